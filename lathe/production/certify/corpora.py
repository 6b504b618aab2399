"""Where the corpora are that a rebuild reads."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from lathe.errors import UserError
from lathe.provenance.statement import Resource
from lathe.storage import sha256


class Corpora:
    """The places of some corpora: where they were, unless they have moved.

    Args:
        attested: the corpora, as the steps attest them.
        given: where some are now. A file goes to the corpus of its digest; one that has no such
            digest, and is alone, goes to every corpus that is not where it was.
    """

    def __init__(self, attested: Iterable[Resource], given: Sequence[str]) -> None:
        digests = {name: sha256(Path(name)) for name in given if Path(name).is_file()}
        self._found = {digest: name for name, digest in digests.items()}
        known = {_file_digest(resource) for resource in attested}
        self._others = [name for name in given if digests.get(name) not in known]

    def place(self, corpus: Resource) -> str:
        """The path or address of a corpus.

        Raises:
            UserError: it has changed, or is not there any more.
        """
        expected, recorded = _file_digest(corpus), corpus.path
        if expected in self._found:
            return self._found[expected]
        if len(self._others) == 1:
            return self._others[0]
        if recorded is None:
            return str(corpus.uri).partition(" ")[0]
        if not recorded.exists():
            why = f"{recorded}: the corpus is not there any more"
            raise UserError(why, "say where with --corpus")
        if expected and sha256(recorded) != expected:
            why = f"{recorded}: the corpus has changed"
            raise UserError(why, "give the original with --corpus")
        return str(recorded)


def _file_digest(corpus: Resource) -> str | None:
    return (corpus.annotations or {}).get("file_sha256")
