"""A Triton server on this machine: its model repository, processes and Python backend.

`runtime` computes texts and scores and knows nothing of servers, `client` asks a server, and
`gateway` is the HTTP server before Triton. The backend, which runs in Triton's process, imports
`runtime` alone. Model repositories of earlier releases import `lathe.serve.backend` and
`lathe.serve.score_backend`, so these names stay.
"""
