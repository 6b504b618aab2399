"""A Triton server: its model repository, processes, Python backend, gateway and clients.

`runtime` generates texts and scores without any server, `client` queries a server, and `gateway` is
the HTTP server in front of Triton. The backend, which runs in Triton's process, imports only
`runtime`. Model repositories import `lathe_serving.backend` and `lathe_serving.score_backend`,
those of earlier releases `lathe.serve.backend` and `lathe.serve.score_backend`: all these names
must stay.
"""
