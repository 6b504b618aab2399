"""The prefix cache alone, with keys and values derived from the tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lathe_serving.runtime.kv_cache import BLOCK, KVCache, PrefixCache
from lathe_serving.runtime.openvino_graph import BLOCK_TOKENS
from lathe_serving.runtime.openvino_model import PagedCache
from lathe_serving.runtime.session import ContiguousCache

HEADS, SIZE, CAPACITY = (3, 1), 2, 256
BLOCK_BYTES = 2 * sum(HEADS) * SIZE * BLOCK * 4


def row(prompt: np.ndarray | None = None, is_paged: bool = False) -> KVCache:
    """Cache with one row whose keys and values are cumulative sums of the tokens."""
    cache: KVCache
    if is_paged:
        shapes = [(1, CAPACITY // BLOCK_TOKENS, n, BLOCK_TOKENS, SIZE) for n in HEADS * 2]
        buffers = [np.zeros(shape, np.float32) for shape in shapes]
        cache = PagedCache(buffers, np.zeros(1, np.int64), CAPACITY, [])
    else:
        buffers = [np.zeros((1, n, CAPACITY, SIZE), np.float32) for n in HEADS * 2]
        cache = ContiguousCache(buffers, np.zeros(1, np.int64), CAPACITY, None)
    if prompt is not None:
        cache.write(0, expected_cache(prompt))
        cache.lengths[0] = len(prompt)
    return cache


def expected_cache(prompt: np.ndarray) -> np.ndarray:
    """Expected keys and values of all layers (heads, n, SIZE)."""
    numbers = np.repeat(np.arange(2 * len(HEADS)), HEADS * 2)
    found = numbers[:, None, None] + np.cumsum(prompt)[None, :, None]
    return np.broadcast_to(found, (len(numbers), len(prompt), SIZE)).astype(np.float32)


def holds(cache: KVCache, prompt: np.ndarray, n: int) -> bool:
    return np.array_equal(cache.read(0, n), expected_cache(prompt[:n]))


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=4 * BLOCK).map(np.array)


@given(st.lists(prompts, max_size=30), st.integers(0, 12 * BLOCK_BYTES), st.booleans())
def test_loaded_blocks_match_the_prompt_and_memory_is_bounded(
    given: list[np.ndarray], max_bytes: int, is_paged: bool
) -> None:
    cache = PrefixCache(max_bytes)
    for prompt in (*given, *given):
        loaded = row(is_paged=is_paged)
        n = cache.load(prompt, loaded)
        assert n == loaded.lengths[0] < max(1, len(prompt) - 1) and n % BLOCK == 0
        assert holds(loaded, prompt, n)
        cache.store(prompt, row(prompt, is_paged))
        assert cache.n_bytes <= max_bytes


def test_computed_blocks_are_reused_by_the_next_prompt() -> None:
    cache, prompt = PrefixCache(2**20), np.arange(3 * BLOCK)
    other = np.concatenate([prompt[: 2 * BLOCK], prompt[:BLOCK]])
    cache.store(prompt, row(prompt))
    assert cache.load(other, row()) == 2 * BLOCK == cache.stored(other)
    cache.store(other, row(other))
    assert cache.n_bytes == 4 * BLOCK_BYTES  # two blocks are shared
    assert (
        cache.load(prompt[: 2 * BLOCK], row()) == BLOCK
    )  # the last token must be read for its logits
    assert cache.load(prompt[: 2 * BLOCK + 1], row()) == BLOCK
    assert cache.load(prompt[: 2 * BLOCK + 2], row()) == 2 * BLOCK
    assert cache.load(prompt, row()) == 2 * BLOCK


@pytest.mark.parametrize("used", [0, 1])
def test_the_least_recently_used_goes_first(used: int) -> None:
    cache = PrefixCache(4 * BLOCK_BYTES)
    first, second, third = (np.full(2 * BLOCK + 2, value) for value in (1, 2, 3))
    for prompt in (first, second):
        cache.store(prompt, row(prompt))
    cache.load((first, second)[used], row())
    cache.store(third, row(third))
    assert cache.stored(third) == 2 * BLOCK
    assert [cache.stored(first), cache.stored(second)] == [[2 * BLOCK, 0], [0, 2 * BLOCK]][used]
