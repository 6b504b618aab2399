"""The only HTTP endpoint in front of Triton, with the OpenAI and KServe APIs.

A chat request, for example, passes these, from top to bottom:

1. `connections.Connection`, uvicorn's protocol with limits: reads its headers.
2. `app.Web`: gives it an id, and rejects other pages and host names. `app.Gateway` routes its path.
3. `endpoint.Endpoint`: makes a `telemetry.Call` of it, which collects what is to be logged. Then
   the key (`admission.Admission.check`), the caller's budget (`Caller.begin`), the body
   (`connections.Bodies.read`), and a place among those in flight (`Admission.place`).
4. `chat.read_chat`: `ChatRequest` parses the body, and `begin_chat` makes of it
   the grammar of its tools (`tools.ToolSchemas`, `tools.tool_grammar`) and
   the token ids of its prompt (`renderer.Renderer`, whose processes run `template`).
5. `chat.Chat`, a `generation.Generation`: waits for slots (`admission.Slots.hold`), and sends the
   prompt to Triton (`triton.Triton.generate`, within `triton.CrashQuarantine.watch`).
6. Its chunks come back on the same stream. `tools.CallReader` finds calls in them, `Chat.stream`
   makes events of them, and `Endpoint` sends these until the client leaves.
7. `Call.end`: a line in the log, the caller's tokens, the metrics, and the spans.

Completions have `completions` in place of `chat`, and `/v1/responses` has `responses` around it.
Requests to `/v2` share steps 1 to 3, and `kserve` forwards them to Triton's own HTTP server. Errors
of all steps are `errors.ApiError` in the end. A module imports only from those later in this list:

    __main__, app, {responses, completions, kserve}, chat, generation, endpoint, {tools, messages},
    {renderer, connections, telemetry}, admission, triton, errors; template by itself
"""
