"""`python -m lathe_base.provenance fetch URI FOLDER`: fetch a release, and reject it unless it
meets `LATHE_REQUIRE`. The server's pods run this before Triton starts."""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from lathe_base.artifacts.kinds import RELEASE_NAME, release_name
from lathe_base.console import end_cleanly_on_sigterm, print_any_text
from lathe_base.errors import EXPECTED_ERRORS, Code, StageError, coded, explain
from lathe_base.provenance.chain import require
from lathe_base.provenance.keys import TRUSTED, trusted_keys
from lathe_base.storage import fetch

REQUIRE = "LATHE_REQUIRE"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lathe_base.provenance",
        description=f"Download a release and verify it. {REQUIRE} lists the required checks, such "
        f"as 'signature,chain,gate,proof', and {TRUSTED} is the folder of the trusted "
        "public keys, *.pub.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("fetch", help="download a release into a folder")
    verb.add_argument("uri", help="s3://bucket/releases/gpt/sha256-.../")
    verb.add_argument("folder", type=Path)
    verb.add_argument(
        "--wait",
        action="store_true",
        help="with an empty uri, wait until terminated: a pod before the first release",
    )
    args = parser.parse_args(arguments)
    print_any_text()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        if args.wait and not args.uri:
            end_cleanly_on_sigterm()
            print("nothing is released yet: waiting for the first release", flush=True)
            signal.pause()
        else:
            print(admit(args.uri, args.folder))
    except EXPECTED_ERRORS as error:
        told = explain(error)
        print(coded(told), file=sys.stderr)
        return told.status
    return 0


def admit(uri: str, folder: Path) -> Path:
    """Fetch a release to `folder`, which is created only if the release meets all requirements.

    Raises:
        UserError: the store does not answer, or a file is corrupt.
        StageError: its bytes do not match the digest in its name, or it fails a requirement.
    """
    waiting = folder  # from before the container was restarted
    if not folder.exists():
        waiting = fetch(uri, folder.with_name(f".{folder.name}.unchecked"))
    name = uri.rstrip("/").rpartition("/")[2]
    if RELEASE_NAME.fullmatch(name) and (actual := release_name(waiting)) != name:
        raise StageError(
            f"{uri} does not match the digest in its name: it has {actual}", Code.CORRUPT
        )
    wanted = [part.strip() for part in os.environ.get(REQUIRE, "").split(",") if part.strip()]
    require(waiting, wanted, trusted_keys())
    return waiting.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
