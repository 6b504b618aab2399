"""Triton endpoints that clients cannot access, over HTTP and gRPC."""

import secrets

RESTRICTED = "model-repository,shared-memory,trace,logging"


def restrictions() -> list[str]:
    """Options that make tritonserver reject requests to these without a new key, which its command
    line shows, in the header `triton-admin` (HTTP) or `triton-grpc-protocol-triton-admin` (gRPC).
    The Deployment has the same, with a key from a Secret."""
    needed = f"{RESTRICTED}:triton-admin={secrets.token_hex(32)}"
    return [f"--http-restricted-api={needed}", f"--grpc-restricted-protocol={needed}"]
