"""Writes files like those of lm-evaluation-harness 0.4 with `--log_samples`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATE = "2026-11-02T09-30-00.123456"


def sha(content: object) -> str:
    return hashlib.sha256(str(content).encode()).hexdigest()


def sample(doc_id: int, values: Mapping[str, Any], filter_name: str = "none") -> dict[str, Any]:
    """Return a logged sample: question `doc_id`, on one of 20 articles."""
    doc = {"question": f"question {doc_id}", "title": f"article {doc_id % 20}"}
    return {
        "doc_id": doc_id,
        "doc": doc,
        "target": "0",
        "arguments": {"gen_args_0": {"arg_0": doc["question"], "arg_1": " yes"}},
        "resps": [[["-1.5", "False"]]],
        "filtered_resps": [["-1.5", "False"]],
        "filter": filter_name,
        "metrics": list(values),
        "doc_hash": sha(json.dumps(doc)),
        "prompt_hash": sha(doc["question"]),
        "target_hash": sha("0"),
        **values,
    }


def write_run(
    folder: Path,
    tasks: Mapping[str, Sequence[Mapping[str, Any]]],
    results: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run with these samples per task, and `results_*.json` if there are results."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tasks.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"samples_{name}_{DATE}.jsonl").write_text(text)
    if results is not None:
        (folder / f"results_{DATE}.json").write_text(json.dumps(results))
    return folder


def questions(right: Sequence[bool], metric: str = "acc") -> list[dict[str, Any]]:
    """Return samples of a task whose examples are right or wrong."""
    return [sample(i, {metric: float(hit)}) for i, hit in enumerate(right)]
