"""A TLS certificate for a server on the loopback interface, from a private CA."""

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path) -> tuple[Path, Path]:
    """Create a server's key and certificate (one file), and the CA's certificate for clients.

    Skips if openssl is not installed.
    """
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    key, server, authority = (folder / f"{name}.pem" for name in ("key", "server", "authority"))
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    make += ["-nodes", "-days", "1"]
    constraint = "basicConstraints=critical,CA:FALSE"
    certificates: tuple[list[str | Path], ...] = (
        ["-subj", "/CN=authority of a test", "-keyout", key, "-out", authority],
        ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", constraint,
         "-CA", authority, "-CAkey", key, "-keyout", folder / "own.pem", "-out", server],
    )  # fmt: skip
    for options in certificates:
        subprocess.run([*make, *options], check=True, capture_output=True)
    server.write_text((folder / "own.pem").read_text() + server.read_text())
    return server, authority
