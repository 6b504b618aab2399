"""A chain is verified back to the corpus; missing, modified or forged parts are errors."""

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from in_toto_attestation.v1 import statement as in_toto
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner
from typer.testing import CliRunner

from lathe.cli import app
from lathe.report.report import verified_chain
from lathe_base.errors import Code, UserError
from lathe_base.provenance.chain import family_tree, verify_chain
from lathe_base.provenance.keys import SIGNING_KEY, generate, load_private, load_verifier
from lathe_base.storage.ownership import ATTESTATIONS, SIGNATURE
from tests.support.attested import AttestedRun
from tests.support.errors import raises

Lines = list[dict[str, object]]


def statements(folder: Path) -> list[dict[str, object]]:
    lines = (folder / ATTESTATIONS).read_text().splitlines()
    return [json.loads(base64.b64decode(json.loads(line)["payload"])) for line in lines]


def change(folder: Path, how: Callable[[Lines], Lines]) -> None:
    path = folder / ATTESTATIONS
    lines = how([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_it_leads_from_the_export_to_the_corpus(made: AttestedRun) -> None:
    chain = verify_chain(made.onnx, [made.public])
    assert [step.statement.step for step in chain.walk()] == ["export", "pretrain", "prepare"]
    *_, first = chain.walk()
    ((corpus, before),) = first.made_by
    assert before is None and corpus.kind == "corpus"
    digest = hashlib.sha256(made.corpus_bytes).hexdigest()
    assert (corpus.annotations or {})["file_sha256"] == digest
    text = json.loads((made.data / "data.json").read_text())["made_from"]["text_sha256"]
    assert corpus.sha256 == text
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as shown:
        console.print(family_tree(chain))
    assert "data: prepare" in shown.get() and "corpus: corpus corpus.txt" in shown.get()


def test_a_verdict_leads_to_both_models(made: AttestedRun) -> None:
    chain = verify_chain(made.folder / "verdict.json", [made.public])
    steps = [step.statement.step for step in chain.walk()]
    assert sorted(steps) == ["evaluate", "evaluate", "gate", "prepare", "pretrain", "pretrain"]
    assert chain.statement.result("verdict") == {"verdict": "pass", "passed": True}


def test_every_statement_is_one_of_in_toto(made: AttestedRun) -> None:
    for values in statements(made.onnx):
        subjects = values["subject"]
        assert isinstance(subjects, list)
        descriptors = [ResourceDescriptor(name=s["name"], digest=s["digest"]).pb for s in subjects]
        statement = in_toto.Statement(descriptors, values["predicateType"], values["predicate"])
        statement.validate()
        assert values["predicateType"] == "https://slsa.dev/provenance/v1"


def test_another_library_verifies_the_signatures(made: AttestedRun) -> None:
    """Uses only cryptography: signatures are over DSSE's pre-authentication encoding."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    public = load_private(made.folder / "key.pem").public_key()
    for line in (made.onnx / ATTESTATIONS).read_text().splitlines():
        envelope = json.loads(line)
        payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
        encoded = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
        (signature,) = envelope["signatures"]
        public.verify(base64.b64decode(signature["sig"]), encoded, ec.ECDSA(hashes.SHA256()))


@pytest.mark.parametrize("name", ["model.onnx", "config.json", "tokenizer.json", "export.json"])
def test_a_changed_file_is_named(made: AttestedRun, name: str) -> None:
    path = made.onnx / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with raises(Code.CORRUPT, name, "`export`"):
        verify_chain(made.onnx, [made.public])


def test_a_missing_file_is_named(made: AttestedRun) -> None:
    (made.onnx / "config.json").unlink()
    with raises(Code.INCOMPLETE, "config.json"):
        verify_chain(made.onnx, [made.public])


def test_a_stripped_attestation_is_an_error(
    made: AttestedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIGNING_KEY, str(made.folder / "key.pem"))
    change(made.onnx, lambda lines: [lines[0], *lines[2:]])
    with raises(Code.UNTRUSTED, "has no attestation"):
        verify_chain(made.onnx, [made.public])
    shown = verified_chain(made.onnx)  # a report shows what exists and what is missing
    assert shown is not None and shown.lines[0].name == "export"
    assert "has no attestation" in (shown.problem or "")
    (made.onnx / ATTESTATIONS).unlink()
    with raises(Code.UNTRUSTED, made.onnx, ATTESTATIONS):
        verify_chain(made.onnx, [made.public])


def test_a_stripped_signature_is_an_error(made: AttestedRun) -> None:
    change(made.onnx, lambda lines: [{**line, "signatures": []} for line in lines])
    with raises(Code.UNTRUSTED, "line 1: not signed"):
        verify_chain(made.onnx, [made.public])


def test_an_altered_statement_is_an_error(made: AttestedRun) -> None:
    def faster(lines: Lines) -> Lines:
        payload = base64.b64decode(str(lines[1]["payload"]))
        altered = payload.replace(b'"seed":1', b'"seed":2').replace(b'"step":"', b'"step":"x')
        return [lines[0], {**lines[1], "payload": base64.b64encode(altered).decode()}, *lines[2:]]

    change(made.onnx, faster)
    with raises(Code.UNTRUSTED, "line 2: not with a trusted key"):
        verify_chain(made.onnx, [made.public])


def test_the_signature_of_another_key_is_an_error(made: AttestedRun, tmp_path: Path) -> None:
    public = generate(tmp_path / "mallory.pem")
    with raises(Code.UNTRUSTED, "not with a trusted key"):
        verify_chain(made.onnx, [public])
    verify_chain(made.onnx, [public, made.public])  # one trusted key is enough

    def forged(lines: Lines) -> Lines:
        envelope = Envelope.from_dict(dict(lines[-1]))
        envelope.signatures.clear()
        envelope.sign(CryptoSigner(load_private(tmp_path / "mallory.pem")))
        signature = envelope.to_dict()["signatures"][0]
        signature["keyid"] = load_verifier(made.public).keyid
        return [*lines[:-1], {**envelope.to_dict(), "signatures": [signature]}]

    change(made.onnx, forged)
    with raises(Code.UNTRUSTED, "not with a trusted key"):
        verify_chain(made.onnx, [made.public])


def test_the_attestations_of_another_model_are_an_error(made: AttestedRun) -> None:
    (made.dense / ATTESTATIONS).rename(made.other / ATTESTATIONS)
    with raises(Code.CORRUPT, "`pretrain`"):
        verify_chain(made.other, [made.public])


def test_a_changed_verdict_is_an_error(made: AttestedRun) -> None:
    path = made.folder / "verdict.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "reasons": ["looks fine"]}))
    with raises(Code.CORRUPT, "`gate`"):
        verify_chain(path, [made.public])


@pytest.mark.parametrize("name", ["verdict.json", "data", "dense-eval"])
def test_unsigned_artifacts_are_verified_by_the_statement_of_their_step(
    made: AttestedRun, tmp_path: Path, name: str
) -> None:
    command = ["verify", str(made.folder / name), "--key"]
    verified = CliRunner().invoke(app, [*command, str(made.public), "--chain"])
    assert verified.exit_code == 0 and "corpus.txt" in verified.output
    other = str(generate(tmp_path / "mallory.pem"))
    refused = CliRunner().invoke(app, [*command, other])
    assert isinstance(refused.exception, UserError)
    assert refused.exception.code is Code.UNTRUSTED
    path = made.folder / name
    path = next(path.glob("*.json")) if path.is_dir() else path
    path.write_text(path.read_text().replace("1", "2", 1))
    altered = CliRunner().invoke(app, [*command, str(made.public)])
    assert isinstance(altered.exception, UserError)
    assert altered.exception.code is Code.CORRUPT


def test_a_model_without_its_signature_is_not_verified(made: AttestedRun) -> None:
    (made.onnx / SIGNATURE).unlink()
    refused = CliRunner().invoke(app, ["verify", str(made.onnx), "--key", str(made.public)])
    assert isinstance(refused.exception, UserError)
    assert refused.exception.code is Code.UNTRUSTED


@pytest.mark.parametrize(
    "text", ["[1]", "1", "{}", "", "text", '{"attestations": 5}', '{"attestations": [5]}']
)
def test_a_file_without_attestations_is_one_error(
    made: AttestedRun, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    refused = CliRunner().invoke(app, ["verify", str(path), "--key", str(made.public)])
    assert isinstance(refused.exception, UserError) and str(path) in str(refused.exception)
    missing = CliRunner().invoke(app, ["verify", str(tmp_path / "no"), "--key", str(made.public)])
    assert isinstance(missing.exception, UserError)
    assert missing.exception.code is Code.NOT_FOUND


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", '{"payload": "", "payloadType": "x"}'])
def test_a_broken_line_is_one_error(made: AttestedRun, text: str) -> None:
    path = made.onnx / ATTESTATIONS
    path.write_text(f"{text}\n{path.read_text()}")
    with raises(Code.MALFORMED, "line 1: "):
        verify_chain(made.onnx, [made.public])
