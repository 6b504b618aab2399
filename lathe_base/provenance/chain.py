"""The chain of steps behind a folder, verified from its files back to the corpus, and the checks of
`Production.require` that a release must pass before it is served."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance import bundle
from lathe_base.provenance.bundle import Attestation, Resource, Statement
from lathe_base.provenance.keys import load_verifier
from lathe_base.provenance.signature import Trust, verify
from lathe_base.provenance.step import KINDS, VERDICT
from lathe_base.storage import digest, sha256
from lathe_base.storage.ownership import ATTESTATIONS

if TYPE_CHECKING:
    from rich.tree import Tree

MADE = {*(kind.name for kind in KINDS), VERDICT}
"""Kinds of materials that are always written by a step, and therefore need an attestation."""

METADATA_FILES = {kind.metadata_file for kind in KINDS}
SHORT = 12  # hex digits that are shown of a digest
HINT = "get the folder again, or recreate it from attested inputs"
T = TypeVar("T")

GRAPH = "model.onnx"
OF_FORMAT = "proof:"
REQUIREMENTS = ("signature", "chain", "gate", "proof")


@dataclass(frozen=True)
class Step:
    """A step of a chain, with the steps that wrote its inputs.

    Attributes:
        made_by: the step that wrote an input, by the input's name and index in the list; external
            inputs, such as a corpus, have none.
    """

    statement: Statement
    made_by: tuple[tuple[Resource, "Step | None"], ...]

    def walk(self) -> "Iterator[Step]":
        """This step and all earlier ones, each once."""
        seen: dict[int, Step] = {}
        waiting = [self]
        while waiting:
            step = waiting.pop(0)
            if id(step) not in seen:
                seen[id(step)] = step
                yield step
                waiting += [before for _, before in step.made_by if before]

    def input(self, name: str) -> "tuple[Resource, Step | None] | None":
        """The first input with this name."""
        return next((pair for pair in self.made_by if pair[0].name == name), None)


def verify_chain(folder: Path, keys: Sequence[Path], is_vouched_for: bool = False) -> Step:
    """Check a folder, or a JSON file with attestations, and all steps behind it.

    The files must match the last step's attestation; every attestation must be signed by one of the
    keys; and every input that Lathe wrote must have one.

    Args:
        is_vouched_for: the folder's verified signature covers the attestations, which then need no
            signatures of their own.

    Raises:
        UserError: one of these does not hold; names the file, or the attestation.
    """
    attestations = bundle.read(folder)
    if not attestations:
        where = f"no `{bundle.EMBEDDED}` in it" if folder.is_file() else f"no {ATTESTATIONS}"
        raise UserError(f"{folder}: no attestations: {where}", HINT, Code.UNTRUSTED)
    # All of them have to be trusted, also any that the chain does not use.
    verifiers = [load_verifier(key) for key in keys]
    for attestation in attestations:
        if not is_vouched_for and not attestation.is_signed_by(verifiers):
            how = "not with a trusted key" if attestation.is_signed else "not signed"
            raise UserError(f"{attestation.where}: {how}", HINT, Code.UNTRUSTED)
    last = attestations[0]  # of the folder's own step
    # The files must be those that their own step attested. The files of earlier steps are not here:
    # their digests are compared from one statement to the next.
    for name, expected in last.statement.products.items():
        path = folder if folder.is_file() else folder / name
        if not path.is_file():
            raise UserError(f"{folder}: {name} is missing", HINT, Code.INCOMPLETE)
        actual = digest(bundle.content(path).decode()) if folder.is_file() else sha256(path)
        if actual != expected:
            raise UserError(
                f"{folder}: {name} differs from what `{last.statement.step}` attested",
                HINT,
                Code.CORRUPT,
            )
    return _Chain(attestations).step(last, ())


def recorded_chain(folder: Path, allows_gaps: bool = False) -> Step | None:
    """The recorded chain, without checking files or signatures; None if there is none.

    Args:
        allows_gaps: outputs of Lathe may lack an attestation, like checkpoints of earlier versions;
            the chain ends there.

    Raises:
        UserError: it is broken.
    """
    attestations = bundle.read(folder)
    if not attestations:
        return None
    return _Chain(attestations, allows_gaps).step(attestations[0], ())


class _Chain:
    """Attestations by the digest of their output: that of its metadata file, or of a single-file
    output."""

    def __init__(self, attestations: Sequence[Attestation], allows_gaps: bool = False) -> None:
        self.by_digest: dict[str, Attestation] = {}
        self.allows_gaps = allows_gaps
        for attestation in attestations:
            products = attestation.statement.products
            for name, product_digest in products.items():
                if name in METADATA_FILES or len(products) == 1:
                    self.by_digest.setdefault(product_digest, attestation)
        self.steps: dict[str, Step] = {}

    def step(self, attestation: Attestation, behind: tuple[str, ...]) -> Step:
        # Every step once, however many later ones have read its output: histories with a diamond at
        # every level would otherwise take exponential time.
        identity = attestation.identity
        if identity in behind:
            raise UserError(f"{attestation.where}: attests its own input", HINT, Code.UNTRUSTED)
        if identity not in self.steps:
            statement = attestation.statement
            made_by = []
            for material in statement.materials:
                maker = self.by_digest.get(material.sha256 or "")
                if maker is None and material.kind in MADE and not self.allows_gaps:
                    raise UserError(
                        f"{attestation.where}: the {material.kind} {material.name} of "
                        f"`{statement.step}` ({(material.sha256 or 'no digest')[:SHORT]}) has no "
                        "attestation",
                        HINT,
                        Code.UNTRUSTED,
                    )
                made_by.append((material, self.step(maker, (*behind, identity)) if maker else None))
            self.steps[identity] = Step(statement, tuple(made_by))
        return self.steps[identity]


def family_tree(step: Step) -> "Tree":
    """The chain as a tree for a terminal: each step with its inputs."""
    from rich.tree import Tree

    shown: set[int] = set()

    def add(to: Tree, resource: Resource | None, current: Step | None) -> None:
        if current is None:
            assert resource is not None
            address = resource.uri or ""
            last = address.rpartition("/")[2] or address
            named = f"{resource.name}: {resource.kind} {last}".rstrip()
            to.add(f"{named}  {(resource.sha256 or address)[:SHORT]}")
            return
        label = f"{resource.name}: " if resource else ""
        branch = to.add(f"{label}{describe(current.statement)}")
        if id(current) in shown:
            if current.made_by:
                branch.add("as above")
            return
        shown.add(id(current))
        for material, before in current.made_by:
            add(branch, material, before)

    root = Tree(describe(step.statement))
    shown.add(id(step))
    for material, before in step.made_by:
        add(root, material, before)
    return root


def describe(statement: Statement) -> str:
    """A step in one line: verb, digest of the output, time."""
    main = list(statement.products.items())[-1]
    finished = statement.predicate.run_details.metadata.finished_on[:16].replace("T", " ")
    return f"{statement.step}  {main[1][:SHORT]}  {finished}"


# --- `Production.require` ---


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
    # A verdict counts only if its candidate is the served model: the export itself, or the
    # checkpoint behind it.
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
    # An attested export in the chain proves nothing if the release has another graph.
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
