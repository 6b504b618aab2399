"""A certificate for a server on the loopback interface, by an authority that nobody knows."""

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path) -> tuple[Path, Path]:
    """Files with the server's key and certificate, and with the certificate alone, for clients;
    skips where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    server, authority = folder / "server.pem", folder / "authority.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", server, "-out", authority],
        check=True, capture_output=True,
    )  # fmt: skip
    server.write_text(server.read_text() + authority.read_text())
    return server, authority
