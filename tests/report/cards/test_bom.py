"""Models' bills of materials are valid CycloneDX and match the folders."""

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from rfc3986_validator import validate_rfc3986

from lathe.report.cards.bom import model_bom
from lathe.report.cards.evidence import Evidence, read_evidence
from lathe_base.artifacts.metadata import Ancestor
from lathe_base.config.settings import CardSettings
from tests.report.cards.conftest import Stages
from tests.report.cards.test_card import full
from tests.support.tables import quick_only


def validated(text: str) -> dict[str, Any]:
    """Validate and parse a document."""
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    values: dict[str, Any] = json.loads(text)
    assert all(validate_rfc3986(address, rule="URI_reference") for address in addresses(values))
    return values


def addresses(value: Any) -> Iterator[str]:
    """Yield every `url` in a JSON value, which the schema's validator does not check."""
    if isinstance(value, list):
        for item in value:
            yield from addresses(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from [item] if name == "url" else addresses(item)


def find_sha256(component: dict[str, Any]) -> str:
    (found,) = component["hashes"]
    assert found["alg"] == "SHA-256"
    return str(found["content"])


@pytest.mark.parametrize(
    "name", quick_only(["dense", "pruned", "int8", "int4", "export"], ["int8", "export"])
)
def test_every_kind_of_model_has_a_valid_one(stages: Stages, name: str) -> None:
    folder = stages.exported if name == "export" else stages.models[name]
    model = validated(model_bom(read_evidence(folder)))["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    assert model["modelCard"]["modelParameters"]["task"] == "text-generation"
    assert "quantitativeAnalysis" not in model["modelCard"]
    files = {file["name"]: find_sha256(file) for file in model["components"]}
    assert {"config.json", "tokenizer.json"} <= files.keys()
    for file, digest in files.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == digest


def test_data_ancestors_and_use_are_in_it(stages: Stages) -> None:
    bom = validated(model_bom(full(stages)))
    model = bom["metadata"]["component"]
    meta = json.loads((stages.models["int8"] / "lathe.json").read_text())
    (parent,) = model["pedigree"]["ancestors"]
    (grandparent,) = parent["pedigree"]["ancestors"]
    assert [find_sha256(x) for x in (parent, grandparent)] == [
        x["sha256"] for x in meta["ancestors"]
    ]
    (data,) = bom["components"]
    assert (data["type"], data["name"]) == ("data", "corpus.txt")
    assert find_sha256(data) == meta["data"]["corpora"][0]["sha256"]
    assert data["licenses"] == [{"license": {"id": "CC0-1.0"}}]
    assert model["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert model["authors"] == [{"name": "The bottle | wall team"}]
    card = model["modelCard"]
    assert card["modelParameters"]["datasets"] == [{"ref": data["bom-ref"]}]
    assert card["modelParameters"]["modelArchitecture"] == "LatheGPT"
    assert card["considerations"]["useCases"] == ["To count bottles | and walls."]
    assert "Out of scope: To count anything else." in card["considerations"]["technicalLimitations"]
    properties = {p["name"]: p["value"] for p in model["properties"]}
    assert properties["lathe:stage"] == "quantize"
    assert any(name.startswith("lathe:quantization:INT8-per-channel") for name in properties)
    (tool,) = bom["metadata"]["tools"]["components"]
    assert tool["name"] == "lathe"


def test_the_figures_are_those_of_the_evaluation(stages: Stages) -> None:
    model = validated(model_bom(full(stages)))["metadata"]["component"]
    metrics = json.loads((stages.evaluations["int8"] / "metrics.json").read_text())
    found = {
        metric["type"]: metric
        for metric in model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    }
    assert float(found["Perplexity"]["value"]) == metrics["text"]["perplexity"]
    assert float(found["Cloze accuracy"]["value"]) == metrics["cloze"]["accuracy"]
    ends = found["Perplexity"]["confidenceInterval"]
    low, high = (float(ends[end]) for end in ("lowerBound", "upperBound"))
    assert low < metrics["text"]["perplexity"] < high
    verdict = json.loads(stages.verdict.read_text())
    considerations = model["modelCard"]["considerations"]
    assert considerations["performanceTradeoffs"] == verdict["reasons"]


def test_the_same_evidence_gives_the_same_bytes_and_other_evidence_another_serial_number(
    stages: Stages,
) -> None:
    text = model_bom(full(stages))
    assert text == model_bom(full(stages))
    serials = [validated(t)["serialNumber"] for t in (text, model_bom(full(stages, verdict=None)))]
    assert serials[0] != serials[1]
    assert "timestamp" not in validated(text)["metadata"]
    timed = validated(model_bom(full(stages), datetime(2026, 1, 31, 12, tzinfo=UTC)))
    assert timed["metadata"]["timestamp"] == "2026-01-31T12:00:00+00:00"


def test_a_blend_and_a_model_of_the_hub(stages: Stages) -> None:
    evidence = read_evidence(stages.models["dense"])
    assert evidence.origin.data is not None
    corpus = evidence.origin.data.corpora[0]
    other = corpus.model_copy(update={"license": "As the novelists say", "source": None})
    data = evidence.origin.data.model_copy(update={"corpora": [corpus, other]})
    hub = Ancestor(sha256="a" * 64, hub="openai-community/gpt2", revision="b" * 40)
    origin = evidence.origin.model_copy(update={"data": data, "ancestors": [hub]})
    bom = validated(model_bom(Evidence(**{**vars(evidence), "origin": origin})))
    assert [c["name"] for c in bom["components"]] == ["corpus.txt", "not stated"]
    assert bom["components"][1]["licenses"] == [{"license": {"name": "As the novelists say"}}]
    (ancestor,) = bom["metadata"]["component"]["pedigree"]["ancestors"]
    assert (ancestor["name"], ancestor["version"]) == ("openai-community/gpt2", "b" * 40)


def test_all_that_can_be_stated_is_in_it(stages: Stages) -> None:
    text = model_bom(full(stages))
    stated = json.loads((stages.models["int8"] / "lathe.json").read_text())["recipe"]["Card"]
    assert stated.keys() == CardSettings.model_fields.keys()
    for key in ("intended_use", "out_of_scope", "contact", "license"):
        assert re.search(re.escape(stated[key]), text), key
