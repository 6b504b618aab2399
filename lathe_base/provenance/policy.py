"""Checks that a release must pass before it is served: `Production.require`."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance.chain import Step, verify_chain
from lathe_base.provenance.signature import Trust, verify

T = TypeVar("T")

GRAPH = "model.onnx"
OF_FORMAT = "proof:"
REQUIREMENTS = ("signature", "chain", "gate", "proof")


def require(folder: Path, wanted: Collection[str], keys: Sequence[Path]) -> None:
    """Check a release, or a model repository, against the requirements.

    `signature`: all files match the signature. `chain`: every step since the corpus is attested,
    and the graph is that of an attested export. `gate`: the model passed the comparison with its
    baseline. `proof`: the exported graph computes the same as the checkpoint, within the tolerance;
    `proof:gguf`: so does that file of the export, in its engine. The last three are read from the
    chain, and imply it.

    Raises:
        UserError: no key, or an unknown requirement.
        StageError: the folder fails a requirement; the message has the reason.
    """
    if not wanted:
        return
    proofs = [name for name in wanted if name == "proof" or name.startswith(OF_FORMAT)]
    if unknown := set(wanted) - {*REQUIREMENTS, *proofs}:
        raise UserError(
            f"Production.require: {min(unknown)}: not one of {', '.join(REQUIREMENTS)}",
            "leave it",
            Code.UNKNOWN_NAME,
        )
    if not keys:
        raise UserError(
            f"Production.require is {', '.join(wanted)}, but no keys are set",
            "set Production.keys to the public keys that you trust or, on a cluster, put them into "
            "the ConfigMap lathe-verification-keys",
            Code.MISSING_OPTION,
        )
    if "signature" in wanted:
        _attempt("signature", lambda: verify(folder, Trust(tuple(keys))))
    if set(wanted) - {"signature"}:
        chain = _attempt("chain", lambda: verify_chain(folder, keys))
        if (served := served_export(chain)) is None:
            what = f"{folder}: no attestation of the `lathe export` that wrote its graph"
            raise _refused("chain", what, Code.UNTRUSTED)
        if "gate" in wanted and (reason := _gate(chain)):
            raise _refused("gate", f"{folder}: {reason}", Code.GATE)
        for name in proofs:
            # The export itself is verified, or one of its formats.
            if not served.statement.result(name):
                what = name.removeprefix(OF_FORMAT) if name.startswith(OF_FORMAT) else "export"
                raise _refused(name, f"{folder}: the {what} was not verified", Code.NOT_PROVED)


def _gate(chain: Step) -> str | None:
    """The reason why the gate was not passed, or None."""
    verdicts = [step for step in chain.walk() if step.statement.step == "gate"]
    if not verdicts:
        return "its attestations do not include a verdict of `lathe gate`"
    served = _models(served_export(chain))
    for verdict in verdicts:
        candidate = verdict.input("candidate")
        if candidate and candidate[1] and served & _models(candidate[1]):
            passed = verdict.statement.result("verdict").get("passed")
            return None if passed is True else "the gate did not pass this model"
    return "the verdict of `lathe gate` is about another model"


def served_export(chain: Step) -> Step | None:
    """The export whose graph a release, deployment or export contains; None if it has another
    graph, or none."""
    step: Step | None = chain
    while step and step.statement.step != "export":
        exported = step.input("deployed") or step.input("exported")
        step = exported[1] if exported else None
    if step is None or step is chain:
        return step
    graphs = {sha256 for name, sha256 in chain.statement.products.items() if is_served(name)}
    return step if graphs == {step.statement.products.get(GRAPH)} else None


def is_served(name: str) -> bool:
    """Whether a file of a model repository is the served graph, `NAME/1/model.onnx`."""
    return len(parts := name.split("/")) == 3 and parts[1:] == ["1", GRAPH]


def _models(step: Step | None) -> set[str]:
    """Digests of the model that a step evaluated or exported, and of the checkpoint behind it."""
    model = step and step.input("model")
    if not model or not model[0].sha256:
        return set()
    resource, before = model
    older = _models(before) if before and before.statement.step == "export" else set()
    return {str(resource.sha256), *older}


def _attempt(name: str, check: Callable[[], T]) -> T:
    try:
        return check()
    except UserError as error:
        raise _refused(name, error.what, error.code) from None


def _refused(name: str, why: str, code: Code) -> StageError:
    return StageError(f"rejected by Production.require ({name}): {why}", code)
