"""Options and settings with invalid values."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS, SMALL
from tests.hostile.paths import case_needs

STORE = "Production.releases=s3://bucket/releases"
NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e309", "many", "", "9" * 400)
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "plan": {
        "--gpus": (*NUMBERS, "1.5"),
        "--gpus-per-node": NUMBERS[:-1],
        "--memory": (*NUMBERS, "80", "80XB", "nanGB", "infGB", "-80GB", "0GB", "1e309GB", "GB"),
    },
    "compress": {
        "--target": (
            *[f"bytes={n}" for n in (*NUMBERS, "1", "2", "0.5=1")],
            *["bytes", "beauty=0.5", "=0.5", "", "="],
        ),
        "--budget": (
            *[f"perplexity={n}" for n in ("nan", "inf", "-inf", "-1", "1e309", "many", "")],
            *["accuracy=nan", "accuracy=1", "accuracy=-inf", "perplexity", "beauty=1", ""],
        ),
        "--trials": ("nan", "-1", "0", "1.5", "many", ""),
    },
    "export-paddle": {"--dtype": ("int8", "", "nan", "float64")},
    "bench-serve": {
        "--clients": ("nan", "-1", "0", "many", ""),
        "--requests": ("nan", "-1", "0", "many"),
        "--rate": ("nan", "inf", "-1", "0", "1e309", "many"),
        "--tokens": ("5:1", "0:3", "a:b", "", ":", "1:2:3", "-1:4", "1e3:2", "nan"),
        "--first-token": ("nan", "-1", "many"),
        "--between-tokens": ("nan", "-1", "many"),
        "--url": ("", "nohost", "http://x:y", "[::1", "127.0.0.1:99999", ":", "a b:1"),
    },
}
WEIGHTS = ("0", "-1", "nan", "inf", "1e309", "many", "")
POSITIVE = ("nan", "inf", "-1", "0", "1e309", "many", "[]", "{}", "true", "1:30", "1.5")
SETTINGS: dict[str, tuple[str, ...]] = {
    "Engine.max_steps": tuple(value for value in POSITIVE if value != "0"),
    "Model.hidden_size": POSITIVE,
    "Global.seed": ("nan", "-1", "1e309", "many", "[]", "true", "1:30"),
    "Optimizer.lr.max_lr": ("nan", "inf", "-1", "0", "1e309", "many", "[]", "true"),
    "Compress.Prune.ratio": ("nan", "-1", "1", "2", "many", "true"),
    "Compress.Prune.heads": ("[-1]", "many", "[1,2]", "3", "{}"),
    "Compress.Quantization.formats": ("{block_0: {qkv: int2}}", "{block_0: int8}", "[1]", "text"),
    "Data.Train.dataset.split": ("nan", "1", "[1,2]", "[0,0,0]", "[-1,1,1]", "1,nan,1", "a,b,c"),
    "Serving.http_port": ("-1", "99999", "1e309", "true", "many"),
    "Prepare.format": ("parquet", "[]"),
    "Gate.confidence": ("nan", "0", "1", "95"),
    "Sensitivity.budget": ("nan", "-1", "inf"),
    "Export.tolerance": ("nan", "0", "inf"),
    "Compress.Quantization.skip_tensor_map": ("{layer: [qkv]}", "{block_0: [nose]}", "[1]", "text"),
}
FORMS = ("", "=", "Engine", "Engine.max_steps", "=3", ".=1", "Engine..max_steps=1", "a b=1")
FORMS += (
    "Nope.key=1",
    "Engine.max_step=1",
    "Engine=3",
    "Engine.max_steps.more=1",
    "x" * 300 + "=1",
)
TOO_LARGE = (
    ("Model.hidden_size=6000000",),
    ("Model.num_layers=1000000000",),
    ("Model.vocab_size=100000000000",),
    ("Model.max_position_embeddings=10000000000",),
    ("Model.ffn_hidden_size=100000000000",),
    ("Global.local_batch_size=1000000000", "Global.micro_batch_size=1000000000"),
    ("Data.Train.dataset.max_seq_len=1000000000",),
)
PARAMETERS: dict[str, tuple[str, ...]] = {
    "--max-tokens": ("-1", "0", "nan"),
    "--temperature": ("nan", "-1"),
    "--top-p": ("nan", "2"),
    "--url": ("", "nohost", "[::1", "127.0.0.1:99999", "127.0.0.1:1"),
}


def cases() -> Iterator[Case]:
    for verb, options in OPTIONS.items():
        for option, values in options.items():
            for value in values:
                yield command_case(
                    verb, f"{option} is no value", value[:20], {option: value}, names=_named(option)
                )
    yield from _weights()
    for key, values in SETTINGS.items():
        for value in values:
            yield setting("recipe", f"{key} is no value", f"{key}={value}", names=key)
    for form in FORMS:
        yield setting("recipe", "-o is no setting", form)
    for settings in TOO_LARGE:
        yield replace(setting("pretrain", "what fits nowhere", *settings), status=(1, 2))
    for option, values in PARAMETERS.items():
        for value in values:
            argv = ("client", f"{option}={value}", *_closed(option), "Once")
            yield Case("client", f"{option} is no value", value, argv, status=(1, 2))
    for port in ("-1", "99999", "nan", ""):
        yield Case("playground", "--port is no value", port, ("playground", f"--port={port}"))
    yield from _deploys()


def _named(option: str) -> str:
    return "" if option == "--url" else option


def command_case(
    verb: str,
    row: str,
    name: str,
    changes: Mapping[str, str],
    extra: tuple[str, ...] = (),
    names: str = "",
) -> Case:
    """Case of a command with changed values, or with extra options before its arguments."""
    command = COMMANDS[verb]
    first, *rest = command.argv(**changes)
    argv = (first, *extra, *rest)
    return Case(verb, row, name, argv, needs=case_needs(command), names=names)


def setting(verb: str, row: str, *settings: str, names: str = "") -> Case:
    extra = tuple(part for value in settings for part in ("-o", value))
    return command_case(verb, row, " ".join(settings)[:60], {}, extra, names)


def _closed(option: str) -> tuple[str, ...]:
    return () if option == "--url" else ("--url=127.0.0.1:1",)


def _weights() -> Iterator[Case]:
    command = COMMANDS["blend"]
    for weight in WEIGHTS:
        changes = {"second": f"paddled={weight}"}
        yield command_case("blend", "a part is none", f"weight {weight}", changes, names="paddled")
    for part in ("paddled", "=1", "=", "", "paddled=1=2", "data=1", "./data/=1", "blended=1"):
        yield Case(
            "blend",
            "a part is none",
            f"part {part}",
            command.argv(second=part),
            needs=case_needs(command, "blended"),
        )
    one = ("blend", "--output=out", "data=1")
    yield Case("blend", "a part is none", "one alone", one, needs=("data",))


def _deploys() -> Iterator[Case]:
    for name, argv in (
        ("rollback without releases", ("rollback",)),
        ("rollback to no digest", ("rollback", "--to", "")),
        ("publish without releases", ("publish", "deployed")),
        ("publish of what was not deployed", ("publish", "data", "-o", STORE)),
        ("publish of nothing", ("publish", "nowhere", "-o", STORE)),
    ):
        argv = ("release", *argv, "--recipe", SMALL)
        needs = (SMALL, "deployed", "data")
        yield Case("release", "options that do not fit", name, argv, needs=needs)
    for port in ("99999", "-1"):
        yield setting("deploy", "a port that is none", f"Serving.http_port={port}")
    for model in ("../x", "a/b", "''", "."):
        yield setting("deploy", "a name that is none", f"Serving.model_name={model}")
    no_address = ("release", "list", "--recipe", SMALL, "-o", "Production.releases=nowhere")
    yield Case("release list", "an address that is none", "a path", no_address, needs=(SMALL,))
