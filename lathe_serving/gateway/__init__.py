"""The only HTTP endpoint in front of Triton, with the OpenAI and KServe APIs.

A chat request, for example, passes these, from top to bottom:

1. `connections.Connection`, uvicorn's protocol with limits: reads its headers.
2. `app.Web`: gives it an id, and rejects other pages and host names. `app.Gateway` routes its path.
3. `app.Endpoint`: makes a `telemetry.Call` of it, which collects what is to be logged. Then
   the key (`admission.Admission.check`), the caller's budget (`Caller.begin`), the body
   (`connections.read_body`), and its count among those in flight (`Admission.track`).
4. `chat.read_chat`: `ChatRequest` parses the body, and `begin_chat` makes of it
   the grammar of its tools (`tools.ToolSchemas`, `tools.tool_grammar`) and
   the token ids of its prompt (`template.Renderer`, whose processes run `template.ChatTokenizer`).
5. `chat.Chat`, a `generation.Generation`: waits for slots (`admission.Slots.hold`), and sends the
   prompt to Triton (`triton.Triton.generate`, within `triton.CrashQuarantine.watch`).
6. Its chunks come back on the same stream. `tools.CallReader` finds calls in them, `Chat.stream`
   makes events of them, and `Endpoint` sends these until the client leaves.
7. `Call.end`: a line in the log, the caller's tokens, the metrics, and the spans.

So three objects are made for a request: its `Call`, the parsed body, and the `Chat`. Completions
have `generation.Completion` in its place, and `/v1/responses` has `responses.Responses` around it.
Requests to `/v2` share steps 1 to 3, and `kserve` forwards them to Triton's own HTTP server. Errors
of all steps are `errors.ApiError` in the end. A module imports only from those later in this list:

    __main__, app, {responses, kserve}, chat, generation, tools,
    {template, connections, telemetry}, admission, triton, errors
"""
