"""Ask a running server many things at the same time, with asyncio.

It asks the server that `make serve` has started:

    .venv/bin/python examples/async_client.py "Once upon a time" "The sea" "In the beginning"
"""

import argparse
import asyncio

from lathe_base.errors import UserError
from lathe_serving.client.async_client import AsyncClient


async def answer(client: AsyncClient, prompt: str, max_tokens: int) -> str:
    """The prompt with its continuation; the server runs all of them in one batch."""
    parts = [prompt]
    async for chunk in client.stream(prompt, max_tokens=max_tokens, seed=1):
        parts.append(chunk.text)
    return "".join(parts)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["Once upon a time", "The sea"])
    parser.add_argument(
        "--url", default="localhost:8001", help="gRPC HOST:PORT, or http://HOST:PORT/v1"
    )
    parser.add_argument("--model-name", default="gpt")
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args()
    async with AsyncClient(options.url, options.model_name, timeout_seconds=60) as client:
        tasks = [answer(client, prompt, options.max_tokens) for prompt in options.prompts]
        for text in await asyncio.gather(*tasks):
            print(text)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except UserError as error:  # says what is wrong, and a hint
        raise SystemExit(f"error: {error}") from None
