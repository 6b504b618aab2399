"""Plants faults in a copy of the project, one at a time, and tells which test finds each.

    python benchmarks/faults.py [--only data gateway ...]

The tests of a fault's room run until the first one fails. That test has to pass again without the
fault; otherwise it does not count. A fault that is not found is a hole in the tests.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SUITES = {
    "quick": "not slow and not long and not soak and not containers and not cluster",
    "slow": "slow and not long",
}
"""What `make test` and `make test-slow` choose."""


class Fault(NamedTuple):
    """A line of code that is replaced, and the tests that should notice.

    Attributes:
        file: of the project.
        old: text that occurs once in it.
        effect: what the fault does, in a few words.
        tests: files below `tests/`.
    """

    file: str
    old: str
    new: str
    effect: str
    tests: str
    suite: Literal["quick", "slow"] = "quick"


FAULTS = {
    "console": Fault(
        "lathe_base/console.py",
        "    sys.exit(128 + number)",
        "    sys.exit(0)",
        "a terminated command reports success",
        "components/test_supervise.py",
    ),
    "storage": Fault(
        "lathe_base/storage/ownership.py",
        "not (target.is_file() and kind.is_one(target))",
        "not target.is_file()",
        "an output file replaces a user's file",
        "storage/test_files.py report/cards/test_release.py",
    ),
    "pages": Fault(
        "lathe_base/pages/html.py",
        "autoescape=True",
        "autoescape=False",
        "a report runs the scripts that a corpus contains",
        "report/test_page.py",
    ),
    "config": Fault(
        "lathe_base/config/recipe.py",
        "layer = _read_override(override).over(layer)",
        "layer = layer.over(_read_override(override))",
        "a recipe's value wins over an override",
        "config/test_recipe.py",
    ),
    "tracking": Fault(
        "lathe_base/tracking/runs.py",
        "stride = math.ceil(len(points) / POINTS) or 1",
        "stride = 1",
        "MLflow gets a point for every step",
        "components/test_tracking.py",
    ),
    "artifacts": Fault(
        "lathe_base/artifacts/journal.py",
        "[k for k, v in identity.items() if recorded.get(k) != v]",
        "[]",
        "work resumes from the results of another model",
        "evaluate/test_resume.py compress/test_sensitivity.py",
    ),
    "provenance": Fault(
        "lathe_base/provenance/bundle.py",
        "return bool(self.envelope.verify(list(keys), 1))",
        "return self.is_signed",
        "a step that anybody has signed is trusted",
        "provenance/test_chain.py",
    ),
    "launch": Fault(
        "lathe_launch/local.py",
        "if not store.check([key])]",
        "if key]",
        "the log names nodes that have joined as missing",
        "launch/test_local.py",
    ),
    "preemption": Fault(
        "lathe_launch/cluster/reasons.py",
        '        if disrupted := _condition(pod, "DisruptionTarget"):',
        '        if disrupted := _condition(pod, "Disruption"):',
        "an evicted pod costs one of the restarts",
        "launch/test_trainjob.py",
    ),
    "rollout": Fault(
        "lathe_launch/cluster/rollout.py",
        "if (total := status.replicas or 0) > updated:",
        "if (total := status.replicas or 0) < updated:",
        "a rollout ends while pods of the old release serve",
        "launch/test_rollout.py",
    ),
    "sampling": Fault(
        "lathe_serving/runtime/sampling.py",
        "excluded = [*end_ids, *params.stop_token_ids]",
        "excluded = [*params.stop_token_ids]",
        "min_tokens does not keep a text from ending",
        "serve/runtime/test_sampling.py",
    ),
    "batcher": Fault(
        "lathe_serving/runtime/kv_cache.py",
        "yield tokens[:end].tobytes()",
        "yield tokens[end - BLOCK : end].tobytes()",
        "a prompt gets the cached keys of one with another beginning",
        "serve/runtime/test_prefix_cache.py serve/runtime/test_batcher.py",
    ),
    "serving": Fault(
        "lathe_serving/repository.py",
        'check_files(repository, REPOSITORY.metadata_file, files, "deploy the model again")',
        "return",
        "a repository with an altered file is served",
        "serve/test_repository.py",
    ),
    "client": Fault(
        "lathe_serving/client/load.py",
        "further = len(self.tokens) - 1",
        "further = len(self.tokens)",
        "a load test reports too short a time per token",
        "serve/test_load.py",
    ),
    "gateway": Fault(
        "lathe_serving/gateway/admission.py",
        "if limit is not None and caller.in_flight >= limit:",
        "if limit is not None and caller.in_flight > limit:",
        "a key gets one more concurrent request than its limit",
        "serve/gateway/test_keys.py",
    ),
    "former names": Fault(
        "lathe/former_names.py",
        'warnings.warn(f"{former} has moved to {name}", DeprecationWarning, stacklevel=2)',
        "pass",
        "a former name is imported without a warning",
        "test_former_names.py",
    ),
    "data": Fault(
        "lathe/data/samples.py",
        "int(0.80 * self.per_epoch)",
        "int(0.08 * self.per_epoch)",
        "an incomplete last epoch displaces samples of the others",
        "data/test_samples.py",
    ),
    "model": Fault(
        "lathe/model/integer_weights.py",
        "scale = self.storable(extreme / self.fmt.range[0])",
        "scale = self.storable(extreme / self.fmt.range[1])",
        "INT4 weights do not use their lowest level",
        "model/test_groups.py",
    ),
    "fake quantization": Fault(
        "lathe/model/integer_weights.py",
        "if self._value is None or made_from != self._made_from:",
        "if self._value is None:",
        "an evaluation computes with the weights of an earlier step",
        "model/test_fake_quant.py model/test_quantization.py",
    ),
    "train": Fault(
        "lathe/train/schedule.py",
        "(step - warmup) / (settings.decay_steps - warmup)",
        "(step - warmup) / settings.decay_steps",
        "the learning rate does not reach its minimum",
        "train/test_trainer.py",
    ),
    "resume": Fault(
        "lathe/train/state_folder.py",
        "[name for name, value in listed.items() if actual[name] != value]",
        "[]",
        "a training resumes from a state with flipped bits",
        "train/test_resume.py",
    ),
    "export": Fault(
        "lathe/export/weight_formats.py",
        "ACTIVATION_ZERO_POINT = 128",
        "ACTIVATION_ZERO_POINT = 127",
        "the INT8 graph shifts every activation by one level",
        "export/test_stage.py",
    ),
    "evaluate": Fault(
        "lathe/evaluate/gate.py",
        'passed = settings.on_inconclusive == "pass"',
        "passed = True",
        "an inconclusive comparison passes the gate",
        "evaluate/test_gate.py",
    ),
    "alpha spending": Fault(
        "lathe/evaluate/gate.py",
        "(1 - confidence) / (look * (look + 1))",
        "(1 - confidence) / look",
        "repeated comparisons let a worse model pass",
        "evaluate/test_alpha_spending.py",
    ),
    "compress": Fault(
        "lathe/compress/widths.py",
        "del kept[losses.index(min(losses))]",
        "del kept[losses.index(max(losses))]",
        "pruning removes the layers that matter most",
        "compress/test_widths.py compress/test_stages.py",
    ),
    "backends": Fault(
        "lathe/backends/torch_file.py",
        '"BFloat16Storage": "bfloat16"',
        '"BFloat16Storage": "<f2"',
        "bfloat16 weights of a Megatron checkpoint are read as float16",
        "backends/test_torch_file.py backends/test_megatron_checkpoint.py",
    ),
    "plan": Fault(
        "lathe/plan/order.py",
        "if not same_kind or call.tensors != its.tensors:",
        "if not same_kind:",
        "a collective of unequal shapes passes the plan",
        "plan/test_order.py",
    ),
    "report": Fault(
        "lathe/report/summary.py",
        "if self.has_ratio and row is not first and reference:",
        "if self.has_ratio and row is first and reference:",
        "the summary compares the baseline with itself",
        "report/test_summary.py",
    ),
    "release": Fault(
        "lathe/release/release.py",
        "if self._parse(text) != seen:",
        "if False:",
        "of two deployments at once, both go live",
        "release/test_releases.py",
    ),
    "search": Fault(
        "lathe/search/prices.py",
        "n_in = ceil(n_in / group_size) * group_size",
        "pass",
        "the price of a padded weight is too low",
        "search/test_program.py",
    ),
    "cli": Fault(
        "lathe/cli/__init__.py",
        "        sys.exit(told.status)",
        "        sys.exit(1)",
        "invalid input has the exit status of a failure",
        "test_cli.py",
    ),
    "paddle": Fault(
        "lathe_paddle/fake_quant.py",
        "set_range(quantizer, ACTIVATION_LEVELS * scale)",
        "set_range(quantizer, scale)",
        "ranges of a quantized Paddle model are 127 times too small",
        "paddle/test_stages.py",
        "slow",
    ),
    "components": Fault(
        "components/machines.py",
        "return launch.nodes > 1 or launch.queue is not None",
        "return launch.nodes > 1",
        "a training on one node does not wait in its queue",
        "pipelines/test_resources.py pipelines/test_placement.py pipelines/test_submit.py",
    ),
    "local pipelines": Fault(
        "pipelines/local/runner.py",
        "if damage := _damage(entry):",
        'if damage := "":',
        "a step is not repeated although its output was altered",
        "pipelines/test_cache.py",
    ),
    "cluster pipelines": Fault(
        "pipelines/cluster/capacity.py",
        "total = {key: amount * need.pods for key, amount in asked.items()}",
        "total = asked",
        "the doctor counts one pod of a training on several nodes",
        "pipelines/test_doctor.py",
    ),
    "manifests": Fault(
        "manifests/base/serve/deployment.yaml",
        "--http-address=127.0.0.1",
        "--http-address=0.0.0.0",
        "Triton is reached past the gateway and its keys",
        "manifests/test_serve.py",
    ),
}


def copy_project(folder: Path) -> None:
    """Copy what git tracks, with the checkout's environments."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for environment in ROOT.glob(".venv*"):
        (folder / environment.name).symlink_to(environment.resolve())


def first_failure(folder: Path, suite: str, tests: list[str]) -> str:
    """The first test that fails; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-m", SUITES[suite], *tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode in (0, 5):  # 5: no test is in this suite
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - |$)", done.stdout, re.M)
    return found[1] if found else f"pytest: {(done.stdout + done.stderr)[-200:]!r}"


def finder(folder: Path, fault: Fault) -> str:
    """The test that finds a fault; empty if none does."""
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file}: {text.count(fault.old)} times: {fault.old}"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        test = first_failure(folder, fault.suite, [f"tests/{name}" for name in fault.tests.split()])
    finally:
        path.write_text(text, encoding="utf-8")
    is_right = test and not first_failure(folder, fault.suite, [test])
    return test if is_right else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    names = parser.parse_args().only
    missed = []
    print("| fault | what it does | found by | s |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        for name in names:
            began = time.monotonic()
            test = finder(Path(folder), FAULTS[name])
            missed += [] if test else [name]
            seconds = time.monotonic() - began
            where = f"`{test}`" if test else "**no test**"
            print(f"| {name} | {FAULTS[name].effect} | {where} | {seconds:.0f} |", flush=True)
    print(f"\n{len(names) - len(missed)} of {len(names)} found", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
