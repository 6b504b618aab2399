"""`python -m lathe_serving.gateway REPOSITORY`: the HTTP server in front of a Triton, until
SIGTERM."""

import argparse
import logging
import os
import sys
from pathlib import Path

from lathe_base.errors import EXPECTED_ERRORS, coded, explain
from lathe_serving.gateway.admission import KEYS_VARIABLE, LIMITS_FILE, ApiKeys, Limits
from lathe_serving.gateway.app import Gateway
from lathe_serving.gateway.connections import Server, raise_file_limit
from lathe_serving.gateway.telemetry import ENDPOINTS, Tracing, processor_from_environment
from lathe_serving.gateway.triton import read_models
from lathe_serving.reach import is_this_machine

ORIGINS_VARIABLE, HOSTS_VARIABLE = "LATHE_CORS_ORIGINS", "LATHE_ALLOWED_HOSTS"
PORTS = (8000, 9000)  # where clients of KServe's interface look for one, and those of OpenAI's
DRAIN_SECONDS = 120  # as long as Triton's own --exit-timeout-secs in the Deployment


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        path = os.environ.get(KEYS_VARIABLE)
        keys = ApiKeys(Path(path)) if path else None
        limits = Limits(
            requests=args.max_requests,
            prompts=args.max_prompts,
            body=args.max_body,
            connections=min(args.max_connections, raise_file_limit()),
        )
        models = read_models(args.repository)
        processor = processor_from_environment()
        tracing = Tracing(processor) if processor else None
        gateway = Gateway(models, args.triton, args.triton_http, limits, keys, tracing)
        if args.server_state:
            gateway.metrics.watch_server(args.server_state)
        origins, hosts = (
            [one.strip() for one in os.environ.get(variable, "").split(",") if one.strip()]
            for variable in (ORIGINS_VARIABLE, HOSTS_VARIABLE)
        )
        server = Server(
            gateway.app(origins, hosts, is_this_machine(args.host)),
            *(gateway.admission, args.drain_seconds, args.host, args.port or PORTS),
            tuple(args.tls) if args.tls else None,
        )
    except EXPECTED_ERRORS as error:
        explained = explain(error)
        print(coded(explained), file=sys.stderr)
        return explained.status
    server.run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lathe_serving.gateway",
        description="Serve the OpenAI and KServe HTTP APIs in front of a Triton server. "
        f"{KEYS_VARIABLE} names a file with one API key per line, which the key's name may follow; "
        f"{LIMITS_FILE} beside it limits keys by name. {ORIGINS_VARIABLE} is a comma-separated "
        f"list of allowed origins of web pages, {HOSTS_VARIABLE} one of host names that a gateway "
        "on loopback answers to, for example a proxy's. "
        f"{ENDPOINTS[1]} is where traces are sent over OTLP.",
    )
    parser.add_argument("repository", type=Path, help="Triton's model repository")
    parser.add_argument("--triton", default="127.0.0.1:8001", help="its gRPC HOST:PORT")
    parser.add_argument("--triton-http", default="127.0.0.1:8003", help="its HTTP HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=int, action="append", help="may be repeated (default: 8000 and 9000)"
    )
    parser.add_argument(
        "--tls",
        type=Path,
        nargs=2,
        metavar=("CERTIFICATE", "KEY"),
        help="serve HTTPS with these PEM files",
    )
    limits = Limits()
    numbers = {
        "--max-requests": (limits.requests, "maximum number of concurrent requests"),
        "--max-prompts": (limits.prompts, "maximum number of prompts per request"),
        "--max-body": (limits.body, "maximum size of a request body, in bytes"),
        "--max-connections": (limits.connections, "maximum number of open connections"),
        "--drain-seconds": (DRAIN_SECONDS, "to complete requests in flight after SIGTERM"),
    }
    for option, (default, text) in numbers.items():
        parser.add_argument(option, type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument(
        "--server-state", type=Path, help="state file of a supervised Triton, for the metrics"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
