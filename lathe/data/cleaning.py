"""Cleaning of a corpus: drops bad rows, and documents by length, language or repetition.

Near duplicates are found by MinHash with locality-sensitive hashing (Broder, 1997; Lee et al.,
Deduplicating training data makes language models better, 2022), over runs of `SHINGLE` words.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Mapping
from functools import partial

from lathe.data.rows import Row
from lathe_base.config.settings import PrepareSettings
from lathe_base.errors import UserError

log = logging.getLogger("lathe")

NAMED = 5
"""Number of skipped rows that are named; the others are only counted."""
SHINGLE = 5
PERMUTATIONS, BANDS = 128, 32
"""With four values per band, a pair with a similarity of 0.8 is compared with probability
0.99999."""
SEED = 42
LANGUAGE_CHARACTERS = 2000
"""Number of a document's characters from which its language is detected."""
WORD = re.compile(r"\w+")


class Reading:
    """Decides for one document after another whether it is kept.

    Memory: 32 bytes per document for exact duplicates, about 2 KB for near ones.

    Attributes:
        left_out: rows and documents that were left out, by reason.
    """

    def __init__(self, settings: PrepareSettings) -> None:
        self.settings = settings
        self.left_out: Counter[str] = Counter()
        self._digests: set[bytes] = set()
        if settings.duplicates == "near":
            import rensa  # type: ignore[import-untyped]

            self._sketch = partial(rensa.RMinHash, PERMUTATIONS, SEED)
            self._near = rensa.RMinHashDeduplicator(
                settings.near_duplicate_similarity, PERMUTATIONS, True, BANDS, SEED
            )

    def text(self, row: Row) -> str:
        """The text of a row; empty if it is broken and skipped.

        Raises:
            UserError: it is broken.
        """
        try:
            return row.text()
        except UserError as error:
            if self.settings.on_bad_row == "fail":
                hint = f"{error.hint}; or skip such rows: Prepare.on_bad_row=skip"
                raise UserError(error.what, hint, error.code) from None
            self.left_out["broken_rows"] += 1
            if self.left_out["broken_rows"] <= NAMED:
                log.warning("skipped: %s", error.what)
            return ""

    def report(self) -> None:
        """Log how much was dropped, if anything."""
        if self.left_out:
            log.warning("dropped from the corpus: %s", counted(self.left_out))

    def keeps(self, text: str) -> bool:
        """Whether a stripped document is kept; dropped ones are counted."""
        reason = self._reason(text)
        if reason:
            self.left_out[reason] += 1
        return not reason

    def _reason(self, text: str) -> str:
        # The cheapest checks first: what one drops, later ones do not remember.
        settings = self.settings
        if len(text) < settings.min_characters:
            return "too_short"
        if settings.max_characters is not None and len(text) > settings.max_characters:
            return "too_long"
        if settings.languages and language(text) not in settings.languages:
            return "other_languages"
        if settings.duplicates != "keep":
            digest = hashlib.sha256(text.encode()).digest()[:16]  # 128 bits: no accidental equals
            if digest in self._digests:
                return "exact_duplicates"
            self._digests.add(digest)
        if settings.duplicates == "near":
            words = WORD.findall(text.lower())
            last = max(1, len(words) - SHINGLE + 1)
            sketch = self._sketch()
            sketch.update([" ".join(words[i : i + SHINGLE]) for i in range(last)])
            # Adds it and returns True, unless an earlier document is a near duplicate.
            if not self._near.add(str(len(self._digests)), sketch):
                return "near_duplicates"
        return ""


def counted(left_out: Mapping[str, int]) -> str:
    """Describes how much was dropped."""
    named = ((reason.replace("_", " "), count) for reason, count in left_out.items() if count)
    return ", ".join(f"{count:,} {reason}" for reason, count in named)


def language(text: str) -> str:
    """The ISO 639-1 code of a text's language, from its beginning."""
    import py3langid  # type: ignore[import-untyped]  # half a second, and few need it

    return str(py3langid.classify(text[:LANGUAGE_CHARACTERS])[0])
