"""The files of a folder that are its text: without hidden ones, and of a data set repository those
of one split, as Hugging Face's `datasets` finds it, by the configs of its card or, without any, by
the names of folders and files. Tables of data lakes and unreadable compressions are refused.

Source: `datasets` 5.2, `data_files.py`, `load.py` and `utils/metadata.py`.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import yaml

from lathe.data.rows import COMPRESSED, file_kind, is_notice
from lathe_base.errors import Code, UserError, explain_os_error
from lathe_base.storage.splits import Located

log = logging.getLogger("lathe")

UNREADABLE = {".lz4", ".lzo", ".br", ".sz", ".snappy", ".lzma", ".z"}
ARCHIVES = {".zip", ".7z", ".rar"}
HUDI = ".hoodie"

CARD = "README.md"
CARD_KEYS = {
    *("configs", "dataset_info", "pretty_name", "size_categories", "task_categories", "task_ids"),
    *("annotations_creators", "language_creators", "multilinguality", "source_datasets"),
    *("license", "language", "viewer"),
}
"""Keys of a card's YAML that other pages with front matter lack."""
METADATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
PROSE = {".txt", ".md"}
JSON_KINDS = {".json", ".jsonl", ".ndjson"}
PREFERRED = (".parquet", ".arrow", ".jsonl", ".csv")
"""Kinds of files, of which the first is read where two are equally common."""
TRAIN, ALL = "train", "all"
KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SEPARATOR = "[-._ 0-9]"
IN_FOLDER_NAMES = ("**/{0}/**", "**/{0}{1}*/**", "**/*{1}{0}/**", "**/*{1}{0}{1}*/**")
IN_FILE_NAMES = ("**/{0}{1}*", "**/*{1}{0}{1}*")
SHARDED = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")

Splits = dict[str, list[str]]
"""Names of files by split."""


def names_below(folder: Path) -> list[str]:
    """The relative names of all files; those in hidden folders are left out, but for Hudi's, which
    tells what the folder is."""
    names_below: list[str] = []

    def fail(error: OSError) -> NoReturn:  # `os.walk` would skip the folder
        raise explain_os_error(error)

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") or name == HUDI]
        names_below += [Path(parent, name).relative_to(folder).as_posix() for name in names]
        for link in (p for p in (Path(parent, name) for name in folders) if p.is_symlink()):
            log.warning("skipping %s: a link to a folder", link)
    return names_below


def data_files(names: Iterable[str], where: str, endings: Container[str]) -> list[str]:
    """The names of files with data, sorted.

    Args:
        endings: of files that are read, without that of the compression.

    Raises:
        UserError: the folder is a table of a data lake, whose files may be outdated, or a file's
            compression cannot be read.
    """
    paths = sorted(map(PurePosixPath, names))
    for path in paths:
        require_no_lake(path, where)
    seen = [path for path in paths if not any(map(_is_hidden, path.parts))]
    for path in seen:
        require_readable(path, f"{where.rstrip('/')}/{path}", endings)
    hidden = [
        str(path)
        for path in paths
        if any(map(_is_hidden, path.parts)) and file_kind(path) in endings
        if not any(part.startswith(".") for part in path.parts[:-1])
    ]
    if hidden:
        log.warning(
            "%s: left out, because names begin with _ or a dot: %s", where, named_files(hidden)
        )
    data = [str(path) for path in seen if file_kind(path) in endings]
    if len(data) < len(seen):
        log.warning("%s: %d files with other endings ignored", where, len(seen) - len(data))
    return data


def require_readable(path: PurePosixPath, where: str, endings: Container[str]) -> None:
    """Raise UserError, which names `where`, if a file is compressed in a way that is not read."""
    ending = path.suffix.lower()
    if ending in UNREADABLE or (
        ending in ARCHIVES and file_kind(PurePosixPath(path.stem)) in endings
    ):
        raise UserError(
            f"{where}: compressed as {ending}, which cannot be read",
            f"decompress it, or compress it as {', '.join(sorted(COMPRESSED))}",
            Code.UNSUPPORTED,
        )


def require_no_lake(path: PurePosixPath, where: str) -> None:
    """Raise UserError if a file shows that its folder is a table whose log says which of its files
    are current."""
    if "_delta_log" in path.parts:
        kind = "Delta"
    elif path.parent.name == "metadata" and path.name.endswith(".metadata.json"):
        kind = "Iceberg"
    elif HUDI in path.parts:
        kind = "Hudi"
    else:
        return
    raise UserError(
        f"{where}: a table of {kind}, because of {path}; its files may hold deleted rows",
        "write its current rows to Parquet files, and give those, for instance with Spark: "
        f'spark.read.format("{kind.lower()}").load(TABLE).write.parquet(FOLDER)',
        Code.UNSUPPORTED,
    )


def _is_hidden(name: str) -> bool:
    """As Spark and Hive decide: `_day=1` is the folder of a partition."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def chosen(located: Located, names: Sequence[str], data: Sequence[str], card: str) -> Sequence[str]:
    """The files of a folder that belong to its text, in reading order.

    Of a data set repository these are the files of one split, `train` unless `located` names
    another one, or `all`; of any other folder, all data files.

    Args:
        place: the folder, and the requested config and split.
        names: of all files, relative to the folder.
        data: of those whose endings are read.
        card: the text of `README.md`; empty if there is none.

    Raises:
        UserError: there is no such split or config, several configs and none requested, or the
            card is broken.
    """
    _, config, split, *more = (*located.suffix.split(":"), "", "", "")
    if any(more):
        raise UserError(
            f"{located.location}{located.suffix}: not a split",
            "write FOLDER:CONFIG:SPLIT",
            Code.INVALID_VALUE,
        )
    metadata = _metadata(card, f"{located.location.rstrip('/')}/{CARD}")
    # Files about the data, such as its license and the card, belong to a folder of texts only.
    paths = map(PurePosixPath, data)
    rows = [str(path) for path in paths if not is_notice(path) and path.name not in METADATA]
    if not (located.suffix or _is_repository(names, data, rows, metadata)):
        return data
    configs = _configs(metadata, f"{located.location.rstrip('/')}/{CARD}")
    config = _config(configs, config, located)
    splits = _card_splits(configs[config], config, rows, located) if config else infer(rows)
    files = _split(splits, config, split or TRAIN, located)
    others = [
        located.part(config if len(configs) > 1 else "", other)
        for other in (*splits, ALL)
        if other != (split or TRAIN)
    ]
    if len(splits) > 1:
        log.info(
            "%s: split %s, %d of %d files; %s and %s for others",
            *(located.location, split or TRAIN, len(files), len(rows)),
            *(", ".join(others[:-1]), others[-1]),
        )
    return _of_one_kind(files, located.location)


def infer(names: Sequence[str]) -> Splits:
    """The splits by the names of files, in the order train, validation, test, others: those of
    shards in `data`, or else by folders' names, or else by files' names, or else all are `train`;
    files without a split's name are left out."""
    shards: Splits = {}
    for name in names:
        if match := SHARDED.fullmatch(name):
            shards.setdefault(match[1], []).append(name)
    if shards:
        order = [name for name in KEYWORDS if name in shards]
        return {name: shards[name] for name in [*order, *sorted(shards.keys() - KEYWORDS.keys())]}
    for patterns in (IN_FOLDER_NAMES, IN_FILE_NAMES):
        splits: Splits = {}
        for split, words in KEYWORDS.items():
            for word in words:
                # Without this, patterns take minutes for a hundred thousand files.
                likely = [name for name in names if word in name]
                matching = _matching(likely, [p.format(word, SEPARATOR) for p in patterns])
                splits.setdefault(split, []).extend(matching)
        if any(splits.values()):
            return {split: [*dict.fromkeys(files)] for split, files in splits.items() if files}
    return {TRAIN: list(names)} if names else {}


def _is_repository(
    names: Sequence[str], data: Sequence[str], rows: Sequence[str], metadata: Mapping[str, Any]
) -> bool:
    """Whether a folder is a data set repository rather than a folder of texts: it has a card, its
    only prose is about its tables, or its files are named after splits."""
    if CARD_KEYS & metadata.keys() or "dataset_infos.json" in names:
        return True
    tables = [name for name in rows if file_kind(PurePosixPath(name)) not in PROSE]
    if tables and len(tables) == len(rows) and {CARD, ".gitattributes"} & {*names}:
        return True
    splits = infer(tables or rows)
    # Pages may be about training and tests: only a folder whose texts all have a split is split.
    all_are_named = {*rows} == {name for files in splits.values() for name in files}
    return TRAIN in splits and len(splits) > 1 and (bool(tables) or all_are_named)


def _metadata(card: str, where: str) -> Mapping[str, Any]:
    """The YAML between the first two lines of dashes; raises UserError if it is broken."""
    match = re.match(r"---\r?\n(.*?)^---\s*$", card, re.DOTALL | re.MULTILINE)
    try:
        metadata = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        if match and re.search("^configs:", match[1], re.MULTILINE):
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{where}: not YAML: {reason}", "fix the YAML of the card", Code.MALFORMED
            ) from error
        return {}
    return metadata if isinstance(metadata, Mapping) else {}


def _configs(metadata: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """The card's configs by name."""
    configs = metadata.get("configs") or []
    hint = "write configs: [{config_name: ..., data_files: ...}] into the card"
    if not isinstance(configs, list):
        raise UserError(f"{where}: configs: not a list", hint, Code.MALFORMED)
    for config in configs:
        if not isinstance(config, Mapping) or "config_name" not in config:
            raise UserError(f"{where}: configs: one without a config_name", hint, Code.MALFORMED)
    return {str(config["config_name"]): config for config in configs}


def _config(configs: Mapping[str, Mapping[str, Any]], requested: str, located: Located) -> str:
    """The requested config, or else the default one; empty if there are none."""
    among = f" among {_listed(configs)}" if configs else ": it has none"
    if requested and requested not in configs:
        hint = f"name one: {located.part(next(iter(configs)))}" if configs else "leave it out"
        raise UserError(
            f"{located.location}: no config {requested!r}{among}", hint, Code.UNKNOWN_NAME
        )
    defaults = [n for n, config in configs.items() if n == "default" or config.get("default")]
    if requested or not configs:
        return requested
    if len(configs) == 1 or len(defaults) == 1:
        return (defaults or [*configs])[0]
    raise UserError(
        f"{located.location}: several configs: {_listed(configs)}",
        f"name one: {located.part(next(iter(configs)))}",
        Code.AMBIGUOUS,
    )


def _card_splits(
    config: Mapping[str, Any], name: str, rows: Sequence[str], located: Located
) -> Splits:
    """The splits of a config.

    Raises:
        UserError: its `data_files` are neither a path, nor a list of paths or of splits with
            paths, or there is no such file.
    """
    where = f"{located.location.rstrip('/')}/{CARD}: config {name!r}"
    folder = str(config.get("data_dir") or "").strip("/")
    prefix = f"{folder}/" if folder else ""
    if config.get("data_files") is None:
        # A config with a folder alone: its splits are found by names, as in a folder without a
        # card.
        below = [row.removeprefix(prefix) for row in rows if row.startswith(prefix)]
        splits = {split: [prefix + n for n in names] for split, names in infer(below).items()}
        if not splits:
            raise UserError(
                f"{where}: data_dir {folder!r} has no file",
                "get the whole data set",
                Code.INCOMPLETE,
            )
        return splits
    splits = {}
    for split, paths in _paths(config["data_files"], where):
        patterns = [prefix + path.removeprefix("./") for path in paths]
        for pattern in patterns:
            if not _matching(rows, [pattern]):
                raise UserError(
                    f"{where}: data_files: {pattern!r} matches no file that Lathe reads",
                    "get the whole data set, or correct the card",
                    Code.INCOMPLETE,
                )
        splits[split] = _matching(rows, patterns)
    return splits


def _paths(data_files: Any, where: str) -> Iterator[tuple[str, list[str]]]:
    """Each split with its paths."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    if entries and all(isinstance(entry, str) for entry in entries):
        yield TRAIN, entries
        return
    for entry in entries:
        paths = entry.get("path") if isinstance(entry, Mapping) else None
        paths = [paths] if isinstance(paths, str) else paths
        is_named = isinstance(entry, Mapping) and isinstance(entry.get("split"), str)
        if not (is_named and isinstance(paths, list) and all(isinstance(p, str) for p in paths)):
            raise UserError(
                f"{where}: data_files: neither paths nor splits with paths",
                "write data_files: [{split: train, path: ...}] into the card",
                Code.MALFORMED,
            )
        yield entry["split"], paths


def _split(splits: Splits, config: str, split: str, located: Located) -> list[str]:
    if split == ALL and ALL not in splits:
        return [*dict.fromkeys(name for files in splits.values() for name in files)]
    if split not in splits and splits:
        first = next(iter(splits))
        raise UserError(
            f"{located.location}: no split {split!r} among {_listed(splits)}",
            f"name one: {located.part(config, first)}, or {located.part(config, ALL)}",
            Code.UNKNOWN_NAME,
        )
    return splits.get(split, [])


def _of_one_kind(names: Sequence[str], location: str) -> Sequence[str]:
    """The files of the most common kind, never Markdown beside others."""
    # A repository may have the same rows twice, such as Parquet beside JSON: one of them is read.
    kinds = Counter(_kind(name) for name in names)
    if len(kinds) < 2:
        return names

    def rank(kind: str) -> tuple[bool, int, int]:
        preference = PREFERRED.index(kind) if kind in PREFERRED else len(PREFERRED)
        return kind != ".md", kinds[kind], -preference

    kind = max(sorted(kinds, reverse=True), key=rank)
    others = [name for name in names if _kind(name) != kind]
    log.warning("%s: its data is %s; left out: %s", location, kind, named_files(others))
    return [name for name in names if _kind(name) == kind]


def _kind(name: str) -> str:
    kind = file_kind(PurePosixPath(name))
    return ".jsonl" if kind in JSON_KINDS else kind


def named_files(names: Sequence[str]) -> str:
    """The first few names, and how many others there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _matching(names: Sequence[str], patterns: Iterable[str]) -> list[str]:
    """The names that match a pattern, in the order of the patterns, each once."""
    split = [(name, name.split("/")) for name in names]
    return [
        *dict.fromkeys(
            name
            for pattern in patterns
            for name, parts in split
            if _matches(parts, pattern.split("/"))
        )
    ]


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether a path matches a pattern, in which `**` stands for any number of folders or, at its
    end, for what is below."""
    if not pattern or not parts:
        return not pattern and not parts
    if pattern == ["**"]:
        return True
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts)))
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
