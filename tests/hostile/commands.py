"""Every verb with arguments that succeed in the world, and the artifact kinds of its paths."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SMALL, PRUNE, QAT = "small.yaml", "small-prune.yaml", "small-qat.yaml"


@dataclass(frozen=True)
class Command:
    """A command that succeeds.

    Attributes:
        arguments: positional arguments, by names used in this package.
        options: values of options by flag.
        inputs: kind of artifact of each path, by argument name or flag.
        output: flag of the output; None if the command writes nothing.
        flags: flags without values.
        metadata: file by which the verb recognizes its own output folder.
        earlier: artifact of the world that this command wrote.
        needs: artifacts needed in addition to those named in the command.
    """

    verb: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    output: str | None = "--output"
    flags: tuple[str, ...] = ()
    metadata: str = ""
    earlier: str = ""
    needs: tuple[str, ...] = ()

    @property
    def written(self) -> str:
        return "" if self.output is None else self.options[self.output]

    def world(self) -> tuple[str, ...]:
        """Artifacts of the world that the command needs."""
        values = {**self.arguments, **self.options}
        named = [values[name].partition("=")[0] for name in self.inputs if name in values]
        return tuple(dict.fromkeys([*named, *self.needs]))

    def argv(self, **changes: str) -> tuple[str, ...]:
        """Command line with values replaced or added, by argument name or flag."""
        arguments = {name: changes.get(name, value) for name, value in self.arguments.items()}
        options = self.options | {k: v for k, v in changes.items() if k not in arguments}
        given = [f"{flag}={value}" for flag, value in options.items()]
        return (
            *self.verb.split(),
            *given,
            *self.flags,
            *(("--", *arguments.values()) if arguments else ()),
        )


def _trains(
    verb: str, model: str, recipe: str, earlier: str, metadata: str = "lathe.json"
) -> Command:
    return Command(
        verb,
        {"model": model},
        {"--data": "data", "--recipe": recipe, "--output": "out"},
        {"model": "checkpoint", "--data": "data", "--recipe": "recipe"},
        metadata=metadata,
        earlier=earlier,
    )


COMMANDS = {
    command.verb: command
    for command in (
        Command(
            "prepare",
            options={
                "--source": "corpus.jsonl",
                "--tokenizer": "tokenizer.json",
                "--recipe": SMALL,
                "--output": "out",
            },
            inputs={"--source": "corpus", "--tokenizer": "tokenizer", "--recipe": "recipe"},
            metadata="data.json",
            earlier="data",
        ),
        Command(
            "tokenizer",
            options={
                "--source": "corpus.jsonl",
                "--tokenizer": "tokenizer.json",
                "--recipe": SMALL,
                "--output": "out",
            },
            inputs={"--source": "corpus", "--tokenizer": "tokenizer", "--recipe": "recipe"},
            metadata="origin.json",
            earlier="vocabulary",
        ),
        Command(
            "tokenize",
            options={
                "--shard": "1/2",
                "--source": "corpus.jsonl",
                "--tokenizer": "tokenizer.json",
                "--recipe": SMALL,
                "--output": "out",
            },
            inputs={"--source": "corpus", "--tokenizer": "tokenizer", "--recipe": "recipe"},
            metadata="shard.json",
            earlier="shard-1",
        ),
        Command(
            "join",
            {"first": "shard-1", "second": "shard-2"},
            {"--recipe": SMALL, "--output": "out"},
            {"first": "shard", "second": "shard", "--recipe": "recipe"},
            metadata="data.json",
            earlier="data",
        ),
        Command(
            "blend",
            {"first": "data=1", "second": "paddled=1"},
            {"--output": "out"},
            {"first": "part", "second": "part"},
            metadata="data.json",
            earlier="blended",
        ),
        Command(
            "pretrain",
            options={"--data": "data", "--recipe": SMALL, "--output": "out"},
            inputs={"--data": "data", "--init": "checkpoint", "--recipe": "recipe"},
            metadata="lathe.json",
            earlier="dense",
        ),
        Command(
            "plan",
            options={"--gpus": "2", "--memory": "80GB", "--recipe": SMALL},
            inputs={"--recipe": "recipe"},
            output=None,
        ),
        _trains("prune", "dense", PRUNE, "pruned"),
        _trains("analyze", "pruned", QAT, "sensitivity", "sensitivity.json"),
        Command(
            "quantize",
            {"model": "pruned"},
            {
                "--data": "data",
                "--recipe": QAT,
                "--sensitivity": "sensitivity",
                "--output": "out",
            },
            {
                "model": "checkpoint",
                "--data": "data",
                "--sensitivity": "sensitivity",
                "--recipe": "recipe",
            },
            metadata="lathe.json",
            earlier="int8",
        ),
        Command(
            "evaluate",
            {"model": "dense"},
            {
                "--data": "data",
                "--cloze": "cloze.jsonl",
                "--recipe": SMALL,
                "--output": "out",
            },
            {
                "model": "checkpoint",
                "--data": "data",
                "--cloze": "cloze",
                "--text": "text",
                "--reference": "checkpoint",
                "--recipe": "recipe",
            },
            metadata="metrics.json",
            earlier="dense-eval",
        ),
        Command(
            "gate",
            {"baseline": "dense-eval", "candidate": "int8-eval"},
            {"--recipe": SMALL, "--output": "out.json"},
            {"baseline": "evaluation", "candidate": "evaluation", "--recipe": "recipe"},
            earlier="gate.json",
        ),
        Command(
            "compress",
            {"model": "dense"},
            {
                "--target": "bytes=0.9",
                "--budget": "perplexity=9",
                "--trials": "1",
                "--data": "data",
                "--recipe": SMALL,
                "--prune-recipe": PRUNE,
                "--qat-recipe": QAT,
                "--output": "out",
            },
            {
                "model": "checkpoint",
                "--data": "data",
                "--cloze": "cloze",
                "--recipe": "recipe",
                "--prune-recipe": "recipe",
                "--qat-recipe": "recipe",
            },
            metadata="compress.json",
            earlier="compressed",
        ),
        _trains("export", "dense", SMALL, "dense-onnx", "export.json"),
        Command(
            "import-paddle",
            {"source": "paddle"},
            {"--tokenizer": "tokenizer.json", "--recipe": SMALL, "--output": "out"},
            {"source": "pdparams", "--tokenizer": "tokenizer", "--recipe": "recipe"},
            metadata="lathe.json",
            earlier="imported",
        ),
        Command(
            "import-megatron",
            {"source": "megatron"},
            {"--tokenizer": "tokenizer.json", "--recipe": SMALL, "--output": "out"},
            {"source": "megatron", "--tokenizer": "tokenizer", "--recipe": "recipe"},
            metadata="lathe.json",
            earlier="imported-megatron",
        ),
        Command(
            "export-paddle",
            {"model": "dense"},
            {"--output": "out"},
            {"model": "checkpoint"},
            metadata="mp_00_sharding_00_pp_00",
            earlier="paddle",
        ),
        Command(
            "deploy",
            {"exported": "dense-onnx"},
            {"--model": "dense", "--data": "data", "--recipe": SMALL, "--output": "out"},
            {
                "exported": "export",
                "--model": "checkpoint",
                "--data": "data",
                "--recipe": "recipe",
            },
            flags=("--no-keep-running",),
            metadata="deploy.json",
            earlier="deployed",
        ),
        Command(
            "release list",
            options={"--recipe": SMALL},
            inputs={"--recipe": "recipe"},
            output=None,
        ),
        Command("serve", {"deployed": "deployed"}, {}, {"deployed": "deployed"}, output=None),
        Command(
            "generate",
            {"model": "dense", "prompt": "Once"},
            {"--recipe": SMALL},
            {"model": "checkpoint", "--recipe": "recipe"},
            output=None,
        ),
        Command(
            "report",
            {"first": "dense", "second": "int8"},
            {"--recipe": SMALL, "--output": "out.html"},
            {
                "first": "checkpoint",
                "second": "checkpoint",
                "--sensitivity": "sensitivity",
                "--deployed": "deployed",
                "--recipe": "recipe",
            },
            earlier="report.html",
            needs=("dense-eval", "int8-eval"),
        ),
        Command(
            "bench-serve",
            options={"--url": "127.0.0.1:1", "--prompts": "prompts.txt", "--output": "out"},
            inputs={"--prompts": "text"},
            metadata="load.json",
        ),
        Command("recipe", {"name": SMALL}, {}, {"name": "recipe"}, output=None),
    )
}

GOOD = {
    "corpus": "corpus.jsonl",
    "tokenizer": "tokenizer.json",
    "recipe": SMALL,
    "data": "data",
    "part": "data",
    "shard": "shard-1",
    "checkpoint": "dense",
    "sensitivity": "sensitivity",
    "cloze": "cloze.jsonl",
    "text": "prompts.txt",
    "evaluation": "dense-eval",
    "pdparams": "paddle",
    "megatron": "megatron",
    "export": "dense-onnx",
    "deployed": "deployed",
    "costs": "costs.json",
    "prices": "prices.json",
    "designs": "designs.json",
}
"""A valid artifact of each kind."""

FOREIGN = dict.fromkeys(GOOD, "data") | {
    "corpus": "dense",
    "data": "dense",
    "part": "dense",
    "export": "dense",
    "checkpoint": "dense-eval",
    "tokenizer": "dense-eval",
}
"""For each kind, a folder that is an artifact of another kind."""

FILES = ("corpus", "tokenizer", "recipe", "cloze", "text")
"""Kinds of artifacts that are single files."""
