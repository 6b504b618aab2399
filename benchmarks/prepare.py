"""A profile of `lathe prepare` on a large corpus, compared to Megatron-LM.

    python benchmarks/prepare.py --texts novels-*.jsonl.xz --tokenizers gpt2/ smollm2/ \\
        --work bench/ [--megatron Megatron-LM/]

The corpus consists of documents of about 8,000 characters from the texts, repeated with shuffled
words up to `--megabytes`, compressed with zstd. A part of it is also tokenized with `tokenizers`
only, whose token files must have the same SHA-256, and with `tools/preprocess_data.py` of a clone
of Megatron-LM, run by `--megatron-python` without and with `--megatron-options`. Seconds are wall
time and CPU time of all processors.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from lathe.data import fast_tokenizer, megatron, prepare, spool, tokenize
from lathe.data.sources import documents
from lathe.data.tokenizer import eos_id, load_tokenizer, save_tokenizer
from lathe_base.config.recipe import load_recipe
from lathe_base.storage import ownership

CHARACTERS = 8000
SPENT: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
"""Wall and CPU seconds of each part, without nested parts."""
STACK: list[tuple[str, float, float]] = []


def enter(part: str) -> None:
    leave()
    STACK.append((part, time.perf_counter(), time.process_time()))


def leave(ended: bool = False) -> None:
    """Add the time since the last update to the innermost part."""
    now = time.perf_counter(), time.process_time()
    if STACK:
        part, *since = STACK.pop()
        for i in range(2):
            SPENT[part][i] += now[i] - since[i]
        if not ended:
            STACK.append((part, *now))
        elif STACK:
            STACK[-1] = (STACK[-1][0], *now)


def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to time it; if it returns an iterator, the iteration is timed."""

    @functools.wraps(work)
    def timed_work(*args: Any, **kwargs: Any) -> Any:
        enter(part)
        try:
            found = work(*args, **kwargs)
        finally:
            leave(ended=True)
        return steps(part, found) if isinstance(found, Iterator) else found

    return timed_work


def steps(part: str, values: Iterator[Any]) -> Iterator[Any]:
    while True:
        enter(part)
        try:
            value = next(values, STACK)
        finally:
            leave(ended=True)
        if value is STACK:
            return
        yield value


PARTS: list[tuple[Any, str, str]] = [
    (prepare, "documents", "read, decompress, parse"),
    (prepare, "Spool", "spool: digest, compress, write"),
    (spool.Spool, "__iter__", "spool: read, decompress, parse"),
    (prepare, "load_tokenizer", "load and check the tokenizer"),
    (fast_tokenizer.Encoder, "__init__", "load and check the tokenizer"),
    (fast_tokenizer.Encoder, "__call__", "tokenize"),
    (tokenize, "_framed", "append end of text"),
    (megatron.MegatronWriter, "extend", "write token files"),
    (prepare, "near_duplicates", "compare with held-out documents"),
    (prepare, "training_index", "n-gram index"),
    (prepare, "_write_held_out", "held-out sets"),
    (ownership, "sha256", "digests of the files"),
]


def passages(texts: Sequence[str], megabytes: float) -> Iterator[bytes]:
    """Yield lines of JSON with this many MB of text in total."""
    rng, left = np.random.default_rng(0), megabytes * 1e6
    for copy in itertools.count():
        for text in itertools.chain.from_iterable(map(documents, texts)):
            for begin in range(0, len(text), CHARACTERS):
                passage = text[begin : begin + CHARACTERS].strip()
                if copy:
                    words = np.array(passage.split(" "), object)
                    passage = " ".join(rng.permutation(words)).strip()
                if passage:
                    left -= len(passage.encode())
                    yield json.dumps({"text": passage}, ensure_ascii=False).encode() + b"\n"
                if left <= 0:
                    return


def corpus(path: Path, texts: Sequence[str], megabytes: float) -> Path:
    if not path.exists():
        packer = zstandard.ZstdCompressor(3)
        with path.with_suffix(".new").open("wb") as file, packer.stream_writer(file) as packed:
            for line in passages(texts, megabytes):
                packed.write(line)
        path.with_suffix(".new").rename(path)
    return path


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Run a function; returns wall seconds, and CPU seconds of this process and its children."""

    def processors() -> float:
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in used)

    started, before = time.perf_counter(), processors()
    work()
    return time.perf_counter() - started, processors() - before


def prepared(source: Path, tokenizer: Path, output: Path, *overrides: str) -> str:
    """Prepare the source from scratch; returns the SHA-256 of its tokens."""
    shutil.rmtree(output, ignore_errors=True)
    prepare.prepare(load_recipe("base", list(overrides)), output, str(source), str(tokenizer))
    return hashlib.sha256((output / "tokens.bin").read_bytes()).hexdigest()


def profile(source: Path, tokenizer: Path, work: Path, megabytes: float) -> None:
    for owner, name, part in PARTS:
        setattr(owner, name, timed(part, getattr(owner, name)))
    whole, used = measured(lambda: prepared(source, tokenizer, work / "whole"))
    print(f"\n{tokenizer}: {megabytes:,.0f} MB of text\n")
    print("| part | seconds | of processors | share |\n|---|---|---|---|")
    rest = [whole - sum(s[0] for s in SPENT.values()), used - sum(s[1] for s in SPENT.values())]
    for part, (seconds, processors) in [*SPENT.items(), ("the rest", rest)]:
        print(f"| {part} | {seconds:.1f} | {processors:.1f} | {seconds / whole:.0%} |")
    print(f"| whole | {whole:.1f} | {used:.1f} | {megabytes / whole:.0f} MB/s |")
    SPENT.clear()


def megatron_run(
    settings: argparse.Namespace, source: Path, tokenizer: Path, options: Sequence[str]
) -> Callable[[], Any]:
    folder = settings.work / "hf"
    folder.mkdir(exist_ok=True)
    loaded = load_tokenizer(tokenizer)
    save_tokenizer(loaded, folder / "tokenizer.json")
    names = dict.fromkeys(("eos_token", "bos_token"), loaded.id_to_token(eos_id(loaded)))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    plain = settings.work / "part.jsonl"  # Megatron-LM cannot decompress
    with source.open("rb") as packed, plain.open("wb") as file:
        zstandard.ZstdDecompressor().copy_stream(packed, file)
    command = [settings.megatron_python, "tools/preprocess_data.py", "--append-eod"]
    command += ["--input", str(plain), "--output-prefix", str(settings.work / "theirs")]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    command += ["--workers", str(os.cpu_count()), *options]

    def run() -> None:
        """Run it, then kill the process group: its pool keeps restarting failing workers."""
        process = subprocess.Popen(
            command,
            cwd=settings.megatron,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if process.wait(settings.timeout):
                raise subprocess.CalledProcessError(process.returncode, command)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    return run


def beside(settings: argparse.Namespace, source: Path, tokenizer: Path) -> None:
    found: dict[str, tuple[float, float]] = {}
    digests: dict[str, str] = {}
    ways = {
        "lathe prepare": True,
        "lathe prepare, `tokenizers` alone": False,
    }
    for name, fast in ways.items():

        def ours(name: str = name, fast: bool = fast) -> None:
            how = f"Prepare.fast_tokenizer={fast}", "Prepare.keep_heldout_apart=False"
            digests[name] = prepared(source, tokenizer, settings.work / "ours", *how)

        found[name] = measured(ours)
    ways_of_megatron = [[], settings.megatron_options] if settings.megatron_options else [[]]
    for options in ways_of_megatron if settings.megatron else []:
        name = " ".join(["Megatron-LM", *options])
        try:
            took = measured(megatron_run(settings, source, tokenizer, options))
        except subprocess.SubprocessError as error:
            print(f"{tokenizer}: {name}: {error}", file=sys.stderr)
            continue
        found[name], tokens = took, settings.work / "theirs_text_document.bin"
        digests[name] = hashlib.sha256(tokens.read_bytes()).hexdigest()
    first = next(iter(found.values()))
    print(f"\n{tokenizer}: {settings.part:,.0f} MB of text\n")
    print("| | seconds | of processors | MB/s | processors' ratio | SHA-256 of tokens.bin |")
    print("|---|---|---|---|---|---|")
    for name, (seconds, processors) in found.items():
        row = (
            *(name, f"{seconds:.1f}", f"{processors:.1f}", f"{settings.part / seconds:.1f}"),
            *(f"{processors / first[1]:.1f}x", digests[name][:16]),
        )
        print("|", " | ".join(row), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", nargs="+", required=True, help="corpora, as for lathe prepare")
    parser.add_argument(
        "--tokenizers", nargs="+", type=Path, required=True, help="tokenizer files or folders"
    )
    parser.add_argument("--work", type=Path, required=True, help="working folder")
    parser.add_argument("--megabytes", type=float, default=1000, help="size of the corpus in MB")
    parser.add_argument("--part", type=float, default=64, help="MB for the slow variants")
    parser.add_argument("--megatron", type=Path, help="clone of Megatron-LM")
    parser.add_argument(
        "--megatron-python", default=sys.executable, help="interpreter for Megatron-LM"
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="time limit of Megatron-LM in seconds"
    )
    parser.add_argument(
        "--megatron-options", type=str.split, default=[], help="extra options of Megatron-LM"
    )
    settings = parser.parse_args()
    if absent := [text for text in settings.texts if not Path(text).exists()]:
        sys.exit(f"skipped: {', '.join(absent)}: no such file")
    settings.work = settings.work.resolve()
    settings.work.mkdir(parents=True, exist_ok=True)
    part = corpus(settings.work / "part.jsonl.zst", settings.texts, settings.part)
    whole = corpus(settings.work / "whole.jsonl.zst", settings.texts, settings.megabytes)
    for tokenizer in settings.tokenizers:
        beside(settings, part, tokenizer)
    for tokenizer in settings.tokenizers[:1]:
        profile(whole, tokenizer, settings.work, settings.megabytes)


if __name__ == "__main__":
    main()
