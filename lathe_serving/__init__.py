"""A Triton server on this machine: its model repository, processes and Python backend.

`runtime` generates texts and scores without any server, `client` queries a server, and `gateway` is
the HTTP server in front of Triton. The backend, which runs in Triton's process, imports only
`runtime`. Model repositories of earlier releases import `lathe.serve.backend` and
`lathe.serve.score_backend`, so these names must stay.
"""
