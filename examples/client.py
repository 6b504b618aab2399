"""Ask a running server: whole, streamed, and how likely a continuation is.

It asks the server that `make serve` has started:

    .venv/bin/python examples/client.py "Once upon a time"
"""

import argparse

from lathe_base.errors import UserError
from lathe_serving.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument(
        "--url", default="localhost:8001", help="gRPC HOST:PORT, or http://HOST:PORT/v1"
    )
    parser.add_argument("--model-name", default="gpt")
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args()
    with Client(options.url, options.model_name, timeout_seconds=60) as client:
        whole = client.generate(
            options.prompt, max_tokens=options.max_tokens, decode_strategy="greedy_search"
        )
        print(f"whole: {options.prompt}{whole.text}")
        print(f"ended by {whole.finish_reason} after {len(whole.tokens)} tokens")

        print(f"streamed: {options.prompt}", end="", flush=True)
        for chunk in client.stream(options.prompt, max_tokens=options.max_tokens, seed=1):
            print(chunk.text, end="", flush=True)
        print()

        if whole.text:
            likelihoods, _ = client.score_text(options.prompt, whole.text)
            print(f"log-likelihood of the whole continuation: {likelihoods.sum():.2f}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # says what is wrong, and a hint
        raise SystemExit(f"error: {error}") from None
