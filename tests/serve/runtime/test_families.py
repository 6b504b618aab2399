"""A Llama-style model in a batch and on Triton generates the same tokens as torch alone."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from lathe.export.export import export
from lathe.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from lathe.model.generate import generate
from lathe_base.config.settings import ExportSettings, GenerationSettings, Recipe, ServingSettings
from lathe_base.parameters import Params
from lathe_serving.client import Client
from lathe_serving.repository import write_repository
from lathe_serving.runtime.text_generator import TextGenerator
from lathe_serving.server import ANY_PORTS, start
from tests.serve.runtime.test_batcher import Caller
from tests.support.families import make, save
from tests.support.small_export import write_held_out

PROMPTS = ("A lathe", "turns", "a much longer prompt, which is read in chunks, and some more of it")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
GREEDY = Params(decode_strategy="greedy_search", min_tokens=0)
WANTED = GenerationSettings(decode_strategy="greedy_search", max_dec_len=12, min_dec_len=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Checkpoint:
    """A Qwen3 model with an additional end token and a chat template."""
    folder = tmp_path_factory.mktemp("llama")
    source = load_checkpoint(save(make("qwen3", head_dim=16), folder / "hf", byte_tokenizer))
    ids = byte_tokenizer.encode(PROMPTS[0]).ids
    (row,) = generate(source.model, [ids], WANTED)
    of_chat = {"end_ids": (row[7],), "chat_template": TEMPLATE}
    source.model.config = replace(source.model.config, **of_chat)
    save_checkpoint(folder / "own", source.model, byte_tokenizer, "pretrain", Recipe())
    return load_checkpoint(folder / "own")


@pytest.fixture(scope="module")
def exported(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_checkpoint(checkpoint, tmp_path_factory.mktemp("exported"))


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> Path:
    data = write_held_out(folder / "data")
    recipe = Recipe(Export=ExportSettings(prompts=2, new_tokens=4))
    return export(recipe, checkpoint.folder, data, folder / "onnx").folder


@pytest.fixture(scope="module")
def generator(exported: Path) -> Iterator[TextGenerator]:
    generator = TextGenerator(exported, 12, threads=1, max_running=4, prefix_bytes=2**20)
    yield generator
    generator.close()


def by_torch(checkpoint: Checkpoint, prompt: str, settings: GenerationSettings) -> list[list[int]]:
    ids = checkpoint.tokenizer.encode(prompt).ids
    return generate(checkpoint.model, [ids], settings, checkpoint.end_ids)


def test_requests_together_get_what_torch_gives_each(
    generator: TextGenerator, checkpoint: Checkpoint
) -> None:
    expected = [by_torch(checkpoint, prompt, WANTED) for prompt in PROMPTS]
    assert len(expected[0][0]) < 12  # ends at the additional end token
    for _ in range(2):  # the second pass uses the prefix cache
        callers = [Caller(generator, prompt, GREEDY) for prompt in PROMPTS]
        assert [caller.wait() for caller in callers] == expected


def test_beams_end_where_those_of_torch_do(
    generator: TextGenerator, checkpoint: Checkpoint
) -> None:
    params = replace(GREEDY, decode_strategy="beam_search", num_beams=3, num_return_sequences=2)
    wanted = WANTED.model_copy(
        update={"decode_strategy": "beam_search", "num_beams": 3, "num_return_sequences": 2}
    )
    for prompt in PROMPTS:
        assert Caller(generator, prompt, params).wait() == by_torch(checkpoint, prompt, wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_triton_serves_it(exported: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    require_served(exported, checkpoint, tmp_path)


LATER = ("smollm3 with a window", "gemma3", "phi3", "olmo2", "starcoder2", "opt")


IN_CI = ("smollm3 with a window", "gemma3", "opt")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in IN_CI else pytest.mark.long)
        for case in [*LATER, "gpt-neox", "gpt-neox, sequential"]
    ],
)
def test_triton_serves_the_other_families(
    case: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    found = load_checkpoint(save(make(case), tmp_path / "hf", byte_tokenizer))
    require_served(export_checkpoint(found, tmp_path), found, tmp_path)


def require_served(exported: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Check that concurrent prompts on Triton get the same tokens as with torch."""
    serving = ServingSettings(**ANY_PORTS, max_running=4, max_queue=8, threads=1)
    repository = write_repository(exported, tmp_path / "repository", serving, WANTED)
    running = start(repository, serving, tmp_path / "state")
    with running as server, Client(server.state.grpc, server.state.model_name) as client:
        found: dict[str, list[int]] = {}

        def ask(prompt: str) -> None:
            found[prompt] = client.generate(
                prompt, decode_strategy="greedy_search", min_tokens=0
            ).tokens

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for prompt in PROMPTS:
        assert found[prompt] == by_torch(checkpoint, prompt, WANTED)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_chat_ends_at_the_models_own_token(
    exported: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    serving = ServingSettings(**ANY_PORTS, max_running=4, max_queue=8, threads=1)
    repository = write_repository(exported, tmp_path / "repository", serving, WANTED)
    with start(repository, serving, tmp_path / "state", with_gateway=True) as server:
        openai = OpenAI(base_url=server.state.openai, api_key="unused", max_retries=0)
        answer = openai.chat.completions.create(
            model=server.state.model_name,
            messages=[{"role": "user", "content": PROMPTS[0]}],
            temperature=0,
        )
        with Client(server.state.grpc, server.state.model_name) as client:
            of_prompt = client.generate(PROMPTS[0], decode_strategy="greedy_search", min_tokens=0)
    assert answer.choices[0].finish_reason == "stop"
    assert of_prompt.tokens == by_torch(checkpoint, PROMPTS[0], WANTED)[0]
    assert answer.choices[0].message.content == of_prompt.text
