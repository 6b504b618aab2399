"""`python -m lathe_base.storage fetch URI FOLDER` and `put PATH URI`, as containers run them."""

import argparse
import logging
import signal
import sys
from pathlib import Path

from lathe_base.console import end_cleanly_on_sigterm, print_any_text
from lathe_base.errors import EXPECTED_ERRORS, coded, explain
from lathe_base.storage import fetch, upload


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lathe_base.storage",
        description="Download files from a store or upload them; interrupted transfers resume. The "
        "AWS variables, or LATHE_S3_SECRET_DIR, set the store and its credentials.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("fetch", help="download an object or a prefix into a folder")
    verb.add_argument(
        "uri", help="s3://bucket/key, s3://bucket/prefix/, file:///folder or https://..."
    )
    verb.add_argument("folder", type=Path)
    verb.add_argument(
        "--wait",
        action="store_true",
        help="with an empty uri, wait until terminated: a server's pod before its first release",
    )
    verb = verbs.add_parser("put", help="upload a file to an object, or a folder to a prefix")
    verb.add_argument("path", type=Path)
    verb.add_argument("uri", help="s3://bucket/key, s3://bucket/prefix/ or file:///path")
    args = parser.parse_args(arguments)
    print_any_text()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        if args.verb == "fetch" and args.wait and not args.uri:
            end_cleanly_on_sigterm()
            print("nothing is released yet: waiting for the first release", flush=True)
            signal.pause()
        elif args.verb == "fetch":
            print(fetch(args.uri, args.folder))
        else:
            upload(args.path, args.uri)
    except EXPECTED_ERRORS as error:
        told = explain(error)
        print(coded(told), file=sys.stderr)
        return told.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
