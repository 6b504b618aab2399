"""Output folders: which files an output may replace, and how it replaces them atomically.

Only files of a verified earlier output of the same kind are ever replaced. A folder that Lathe
wrote has a metadata file, a JSON file that lists every other file in it with its SHA-256. Such a
folder may be replaced if it contains nothing else, and so may an empty one. Everything else belongs
to the user. Stages check this before their work, with `claim_output_folder` and
`claim_output_file`.

The metadata does not list attestations and a signature: these are written after it, and belong to
the folder if their payload contains the SHA-256 of its metadata.

A new folder is written to a temporary name by `atomic_folder`, listed in its metadata, and renamed.
"""

import base64
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lathe_base.errors import Code, UserError, explain_os_error, printable
from lathe_base.storage.files import files_below, is_digest, is_intact, is_relative, sha256

log = logging.getLogger("lathe")

# The metadata of a folder whose files are being replaced one by one.
REPLACED = ".lathe.replaced.json"
OWNER = ".lathe.owner"  # in a scratch folder: the output that it is for
MAX_SHOWN = 3  # file names in a message
SYSTEM = {"lost+found"}  # mkfs creates it in the root of a file system

Source = Path | str | None

ATTESTATIONS = "provenance.intoto.jsonl"
"""DSSE envelopes, one per line."""

SIGNATURE = "model.sig"
"""A Sigstore bundle of OpenSSF Model Signing."""

ATTESTATION_FILES = (ATTESTATIONS, SIGNATURE)


@dataclass(frozen=True)
class Kind:
    """A kind of folder.

    Attributes:
        name: its name in messages.
        metadata_file: its JSON file, which lists the others under `files`.
        keys: the keys that every metadata file of this kind has.
    """

    name: str
    metadata_file: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class FileKind:
    """A kind of single file; `is_one` says whether an existing file is of this kind."""

    name: str
    is_one: Callable[[Path], bool]


# --- claims, before any work ---


def claim_output_folder(output: Path, kind: Kind, *inputs: Source) -> None:
    """Check, before any work, that `output` may become a new folder of this kind.

    Args:
        inputs: files and folders that the work reads; addresses are ignored.

    Raises:
        UserError: `output` contains files that are not from an earlier output of this kind;
            it is an input, is inside one or contains one; it is not writable.
    """
    require_apart(output, *inputs)
    target = real_path(output)
    if not target.exists():
        require_writable(existing_parent(target), output)
        return
    require_writable(target, output)
    if foreign := not_ours(target, kind):
        raise foreign_files_error(output, foreign)


def claim_output_file(output: Path, kind: FileKind, *inputs: Source) -> None:
    """Check, before any work, that `output` may become a new file of this kind; raises as
    `claim_output_folder` does."""
    require_apart(output, *inputs)
    target = real_path(output)
    if target.exists() and not (target.is_file() and kind.is_one(target)):
        raise UserError(
            f"{output}: exists, but is not {kind.name} that Lathe wrote",
            "give another --output, or move it away",
            Code.EXISTS,
        )
    require_writable(existing_parent(target), output)


def require_apart(output: Path, *inputs: Source) -> None:
    """Raise UserError if `output` is one of the inputs, is inside one or contains one."""
    target = real_path(output)
    for input_path in inputs:
        if not input_path or "://" in str(input_path):
            continue
        source = real_path(Path(input_path))
        if source == target or source in target.parents or target in source.parents:
            how = (
                "is"
                if source == target
                else "is inside"
                if source in target.parents
                else "contains"
            )
            raise UserError(
                f"{output}: {how} the input {input_path}",
                "give another --output",
                Code.CONFLICTING_OPTIONS,
            )


def require_utf8(output: Path) -> None:
    """Raise UserError if a path is not UTF-8, which safetensors, TensorBoard and onnx refuse."""
    if "\udc80" <= max(str(output)) <= "\udcff":
        raise UserError(f"{printable(output)}: not UTF-8", "give another --output", Code.BAD_PATH)


def require_writable(folder: Path, output: Path) -> None:
    """Raise UserError unless the folder can be written to."""
    if not folder.is_dir():
        raise UserError(f"{output}: {folder} is a file", "give another --output", Code.WRONG_KIND)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{output}: {folder} is not writable",
            "give another --output, or get permission to write to it",
            Code.PERMISSION,
        )


def existing_parent(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next(parent for parent in path.parents if parent.exists())


def real_path(path: Path) -> Path:
    """Resolve the symbolic links of a path, which need not exist.

    Raises:
        UserError: not a path, or symbolic links that form a loop.
    """
    if "\0" in str(path):
        raise UserError(
            f"{str(path)!r}: not a file name", "remove the NUL character", Code.BAD_PATH
        )
    resolved = Path(os.path.realpath(path))
    if resolved.is_symlink():
        raise UserError(f"{path}: symbolic links form a loop", "remove one of them", Code.BAD_PATH)
    return resolved


def foreign_files_error(output: Path, names: list[str]) -> UserError:
    """The error for an output that would replace the user's own files."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return UserError(
        f"{output}: contains files that Lathe did not write, or that have changed since: "
        f"{', '.join(names[:MAX_SHOWN])}{more}",
        "give a new or empty folder as --output, or move these files away",
        Code.EXISTS,
    )


# --- writing and replacing ---


@contextmanager
def atomic_folder(output: Path, kind: Kind) -> Iterator[Path]:
    """Yield an empty folder that replaces `output` after the block has written its metadata file.

    The list of all other files is added to the metadata. If the block fails, or writes no metadata
    file, `output` stays as it was. The block may put temporary files beside the yielded folder.

    An earlier output is moved aside and deleted file by file, as its own metadata lists them. A
    symbolic link is kept, and the folder that it points to is replaced. A mount point, a folder
    that contains the working directory, and one whose parent is not writable are kept: their files
    are replaced one by one, the metadata last.

    Raises:
        UserError: see `claim_output_folder`; another process is writing to `output`.
    """
    target = real_path(output)
    # A killed attempt may have moved an earlier output aside, and not put the new one there.
    is_gone = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    moved = (path / "old" for path in scratch_folders(target, inside=False))
    if is_gone and (old := next(filter(Path.is_dir, moved), None)):
        os.rename(old, target)
    with ExitStack() as stack:
        stack.enter_context(locked(output))
        claim_output_folder(output, kind)
        # Delete the leftovers of a killed attempt: a partial replacement, and its scratch folders.
        if (target / REPLACED).exists() or not (target / kind.metadata_file).exists():
            remove_files(target, our_files(target, kind))
        for inside in (True, False):
            for stale in scratch_folders(target, inside):
                shutil.rmtree(stale)
        cwd = Path.cwd()
        stays = (
            target.is_mount()
            or cwd == target
            or target in cwd.parents
            or not os.access(target.parent, os.W_OK)
        )
        # On the same file system as the target, so that a rename is all that is left to do.
        parent = target if stays else target.parent
        scratch = Path(tempfile.mkdtemp(prefix=scratch_prefix(target, stays), dir=parent))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        scratch.chmod(0o755)  # mkdtemp leaves it to its owner alone
        (scratch / OWNER).write_bytes(os.fsencode(target))
        work = scratch / "new"
        work.mkdir()
        yield work
        # List the files in the metadata. They are verified against it for as long as they exist.
        metadata = work / kind.metadata_file
        if not metadata.is_file():
            return
        values = json.loads(metadata.read_bytes())
        if "files" not in values:
            values["files"] = {
                name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
                for name, path in files_below(work)
                if path != metadata
            }
            text = json.dumps(values, indent=2, ensure_ascii=False)
            metadata.write_text(f"{text}\n", encoding="utf-8")
        if stays:
            claim_output_folder(output, kind)  # again: the block may have taken hours
            _replace_files(work, target, kind)
        else:
            _replace_folder(work, target, scratch / "old", kind)


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock the folder `output`, which is created if needed and removed again if it stays empty.

    Raises:
        UserError: another process holds the lock.
    """
    target = real_path(output)
    missing = [path for path in (target, *target.parents) if not path.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(OSError(error.errno, error.strerror, str(output))) from None
    # The kernel's lock ends with the process that holds it, even if that is killed.
    handle = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{output}: another process is writing to it",
                "wait until it has finished, or give another --output",
                Code.IN_USE,
            ) from None
        except OSError as error:  # a network file system without locks
            log.debug("%s: not locked: %s", output, error)
        yield
    finally:
        os.close(handle)
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _replace_files(work: Path, target: Path, kind: Kind) -> None:
    """Replace the files one by one. If that is interrupted, the folder has no metadata file, and
    the next attempt still recognizes its files."""
    # The metadata goes first and comes last: at no moment does it list files that are not there.
    if (target / kind.metadata_file).exists():
        os.replace(target / kind.metadata_file, target / REPLACED)
    remove_files(target, our_files(target, kind) - {kind.metadata_file, REPLACED})
    names = [name for name, _ in files_below(work) if name != kind.metadata_file]
    for name in (*names, kind.metadata_file):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if name == kind.metadata_file:
            (target / REPLACED).unlink(missing_ok=True)
        os.replace(work / name, target / name)


def _replace_folder(new: Path, target: Path, old: Path, kind: Kind) -> None:
    """Replace the folder by two renames; one that is killed between them is mended by
    the next `atomic_folder`."""
    os.rename(target, old)  # a folder with files cannot be replaced by one rename
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    remove_files(old, our_files(old, kind))
    with suppress(OSError):
        old.rmdir()
    if old.exists():  # files were added while it was being replaced: they are not ours
        kept = Path(tempfile.mkdtemp(prefix=f"{target.name[:100]}.kept-", dir=target.parent))
        os.rename(old, kept)
        log.warning("%s: files that were added during the replacement are in %s", target, kept)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete these files of a folder, and the folders in it that are empty afterwards."""
    paths = [folder / name for name in names]
    for path in paths:
        path.unlink(missing_ok=True)
    parents = {parent for path in paths for parent in path.parents if folder in parent.parents}
    for parent in sorted(parents, reverse=True):
        with suppress(OSError):
            parent.rmdir()


# --- what an earlier output consists of ---


def not_ours(folder: Path, kind: Kind) -> list[str]:
    """Names in a folder that no metadata file of this kind lists with the right digest."""
    known, scratch = known_files(folder, kind), scratch_folders(folder, inside=True)
    foreign = [
        (name, path)
        for name, path in files_below(folder)
        if not (name in known and _is_plain(path) and any(is_intact(path, d) for d in known[name]))
    ]
    # An empty folder may be the user's too, unless a listed file was in it.
    parents = {str(parent) for name in known for parent in PurePosixPath(name).parents}
    allowed = SYSTEM | parents
    for parent, folders, names in os.walk(folder):
        path = Path(parent)
        name = path.relative_to(folder).as_posix()
        if path != folder and not folders and not names and name not in allowed:
            foreign.append((name, path))
    return [
        name
        for name, path in foreign
        if not any(path.is_relative_to(scratch_path) for scratch_path in scratch)
    ]


def our_files(folder: Path, kind: Kind) -> set[str]:
    """Names of a folder's files that its metadata files list with the right digest."""
    return set(known_files(folder, kind)) - set(not_ours(folder, kind))


def known_files(folder: Path, kind: Kind) -> dict[str, set[str]]:
    """SHA-256 digests, by name, that a folder's metadata files allow, those of the metadata and of
    attestations of it included; several for a name if a replacement was interrupted."""
    known: dict[str, set[str]] = defaultdict(set)
    # Files that are replaced one by one are listed by the old metadata under its temporary name, or
    # by the new one, which is still in the scratch folder.
    scratch = scratch_folders(folder, inside=True)
    candidates = [folder / kind.metadata_file, folder / REPLACED]
    for metadata in (*candidates, *(path / "new" / kind.metadata_file for path in scratch)):
        if listed := listed_files(metadata, kind):
            metadata_digest = sha256(metadata)
            if metadata.parent == folder:
                known[metadata.name].add(metadata_digest)
            for path in (folder / name for name in ATTESTATION_FILES):
                if _is_plain(path) and names_digest(path, metadata_digest):
                    known[path.name].add(sha256(path))
            for name, entry in listed.items():
                known[name].add(entry)
    # Python writes bytecode beside the modules of a release when a server imports them.
    for path in filter(_is_plain, bytecode(folder, list(known))):
        known[path.relative_to(folder).as_posix()].add(sha256(path))
    return known


def names_digest(path: Path, sha256: str) -> bool:
    """Whether `path` has attestations or a signature, its first payload contains this digest, and
    all of its lines are valid."""
    try:
        payloads = []
        for line in path.read_bytes().splitlines():
            values = json.loads(line)
            # A line is an envelope, or a Sigstore bundle around one.
            payloads.append(base64.b64decode(values.get("dsseEnvelope", values)["payload"]))
        return bool(payloads) and sha256.encode() in payloads[0]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def bytecode(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """The bytecode files compiled from the modules among these files."""
    for module in (folder / name for name in names if name.endswith(".py")):
        yield from (module.parent / "__pycache__").glob(f"{module.stem}.cpython-*.pyc")


def listed_files(metadata: Path, kind: Kind) -> dict[str, str]:
    """SHA-256, by name, of the files that a metadata file lists; empty if it is not a metadata file
    of this kind."""
    if not _is_plain(metadata):
        return {}
    try:
        values = json.loads(metadata.read_bytes())
        files = {
            name: entry if isinstance(entry, str) else entry["sha256"]
            for name, entry in values["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    is_metadata = values.keys() >= set(kind.keys) and all(map(is_digest, files.values()))
    return files if is_metadata and all(map(is_relative, files)) else {}


def scratch_folders(target: Path, inside: bool) -> list[Path]:
    """The scratch folders of attempts to write `target`, inside it or beside it."""
    parent = target if inside else target.parent
    prefix = scratch_prefix(target, inside)
    try:
        folders = [path for path in parent.iterdir() if path.name.startswith(prefix)]
        owned = [path for path in folders if _is_plain(path / OWNER)]
        return [path for path in owned if (path / OWNER).read_bytes() == os.fsencode(target)]
    except OSError:
        return []


def scratch_prefix(target: Path, inside: bool) -> str:
    """The name prefix of scratch folders beside, or inside, an output."""
    return ".lathe-" if inside else f".{target.name[:100]}.lathe-"


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
