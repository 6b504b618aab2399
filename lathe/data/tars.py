"""Tar files, read as streams: samples of WebDataset, which are consecutive files with the same name
and different extensions; files of JSON lines; and the wanted files of a downloaded archive."""

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from lathe.data.rows import (
    Row,
    Rows,
    RowText,
    Takes,
    TextKey,
    byte_lines,
    decompressed,
    file_kind,
    is_notice,
    line_text,
    unpacked,
)
from lathe_base.errors import Code, UserError
from lathe_base.inputs import MAX_LINE_BYTES, decode, open_file, parse_json

TEXT_ENDING = "txt"
ARCHIVED_LINES = {".jsonl", ".ndjson"}
"""Endings of JSON lines in an archive, where `.json` is the metadata of a sample."""
TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
MAGIC = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
}
MAX_RATIO = 50
"""Size of a file in an archive, in sizes of the whole archive: weights compress to a half or so,
and a gzip bomb to a thousandth."""
SMALL = 1 << 26
"""Bytes of a file that is read whatever its ratio."""


class _Member(tarfile.TarInfo):
    """A member's header; tarfile mistakes a truncated one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> "_Member":
        if 0 < len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("truncated header")
        return super().frombuf(buf, encoding, errors)


def tar_rows(path: Path, row_text: RowText, takes: Takes) -> Rows:
    """Read the text of every sample, one sample in memory at a time, and of every line of the
    archive's `.jsonl` and `.ndjson` files, compressed or not.

    Args:
        row_text: a key is the ending of the file with the text (`txt`); a key of the sample's
            `json` (`json.caption`); or `text`, which is `txt` where a sample has it, else
            `json.text`. A conversation is the sample's `json`. Of JSON lines, as in a file of
            their own.

    Raises:
        UserError: not a tar file, or a truncated one.
    """
    wanted = {"json"}
    if isinstance(row_text, TextKey):
        key = row_text.key
        wanted = {"txt", "json"} if key == "text" else {key, key.partition(".")[0]}
    for number, (read, content, where) in enumerate(_records(path, wanted)):
        if takes(number):
            yield Row(number, partial(read, content, where, row_text))


def is_tar(path: Path) -> bool:
    """Whether a file is named like a tar archive."""
    return path.name.lower().endswith(TARS)


def files_in_tar(
    path: Path, is_wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of the wanted regular files of a downloaded archive, to be read in turn.

    Nothing is unpacked to the disk, so that names cannot lead out of a folder, and links are not
    followed. The compression is recognized by the first bytes: many a `.tar` is compressed.

    Raises:
        UserError: not a tar file, a truncated one, or a file that is absurdly large for its
            archive.
    """
    with open_file(path) as file:
        start = file.read(max(map(len, MAGIC)))
    ending = next((end for magic, end in MAGIC.items() if start.startswith(magic)), "")
    packed = path.stat().st_size
    with unpacked(path, ending) as stream:
        with _tar_errors(path), tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                if not (member.isfile() and is_wanted(PurePosixPath(member.name))):
                    continue
                if member.size > max(SMALL, MAX_RATIO * packed):
                    raise UserError(
                        f"{path}: {member.name} would be {member.size:,} bytes, from an archive of "
                        f"{packed:,}",
                        "unpack the archive yourself if you trust it, and give the folder",
                        Code.TOO_LARGE,
                    )
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content
        while stream.read(1 << 20):  # to its end, where gzip has a checksum
            pass


@contextmanager
def _tar_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except tarfile.TarError as error:
        raise UserError(
            f"{path}: cannot be read as a tar file: {error}",
            "check that the file is complete",
            Code.MALFORMED,
        ) from error


def _records(path: Path, wanted: set[str]) -> Iterator[tuple[Callable[..., str], Any, str]]:
    """Each sample and each JSON line: the function that returns its text, its content, and where
    it is. A sample's content is that of its files with some endings, or, of one that is too large,
    words."""
    name: str | None = None
    files: dict[str, bytes | str] = {}
    with (
        unpacked(path) as stream,
        _tar_errors(path),
        tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive,
    ):
        for member in archive:
            if not member.isfile():
                continue
            folder, slash, file = member.name.rpartition("/")
            base, _, ending = file.partition(".")
            if not base or is_notice(PurePosixPath(file)):  # hidden, or about the samples
                continue
            has_lines = ending not in wanted and file_kind(PurePosixPath(file)) in ARCHIVED_LINES
            sample = None if has_lines else f"{folder}{slash}{base}"
            # A sample ends where a file with another name begins.
            if sample != name:
                if name is not None:
                    yield _text, files, f"{path}: sample {name}"
                name, files = sample, {}
            if not has_lines and ending not in wanted:
                continue
            extracted = archive.extractfile(member)
            assert extracted is not None
            if has_lines:
                where = f"{path}: {member.name}"
                packing = PurePosixPath(member.name).suffix.lower()
                lines = byte_lines(decompressed(extracted, packing), where)
                for number, line in enumerate(lines, 1):
                    yield line_text, line, f"{where}:{number}"
            else:
                is_small = member.size <= MAX_LINE_BYTES
                files[ending] = extracted.read() if is_small else "more than 256 MiB"
    if name is not None:
        yield _text, files, f"{path}: sample {name}"


def _text(files: dict[str, bytes | str], where: str, row_text: RowText) -> str:
    # `text`, the key where the text of other files is, here means a file or a key of the metadata.
    if row_text == TextKey("text"):
        row_text = TextKey(TEXT_ENDING if TEXT_ENDING in files else "json.text")
    is_raw = row_text == TextKey("json")
    row = {}
    for ending, content in files.items():
        if isinstance(content, str):
            raise UserError(f"{where}.{ending}: {content}", "remove the sample", Code.TOO_LARGE)
        text = decode(content, f"{where}.{ending}")
        is_json = ending == "json" and not is_raw
        row[ending] = parse_json(text, f"{where}.json", "correct it") if is_json else text
    return row_text(row if isinstance(row_text, TextKey) else row.get("json", {}), where)
