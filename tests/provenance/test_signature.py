"""Signatures of folders: changes after signing are named, and other tools can verify them."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from typer.testing import CliRunner

from lathe.cli import app
from lathe_base.errors import Code, UserError
from lathe_base.provenance.keys import PASSWORD, generate, load_private
from lathe_base.provenance.signature import Signer, Trust, sign, verify
from lathe_base.storage.ownership import ATTESTATIONS
from tests.support.attested import AttestedRun
from tests.support.errors import raises


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 40)
    (folder / "sub" / "config.json").write_text("{}")
    (folder / ".gitignore").write_text("nothing is overlooked\n")
    return folder


@pytest.fixture
def key(tmp_path: Path) -> Path:
    generate(tmp_path / "key.pem")
    return tmp_path / "key.pem"


@pytest.fixture
def trust(key: Path) -> Trust:
    return Trust((key.with_suffix(".pub"),))


@pytest.fixture
def signed(folder: Path, key: Path) -> Path:
    sign(folder, Signer(key))
    return folder


def test_a_signed_folder_verifies_wherever_it_is(signed: Path, trust: Trust) -> None:
    assert verify(signed, trust) == 3
    assert verify(signed.rename(signed.with_name("elsewhere")), trust) == 3


@pytest.mark.parametrize("name", ["weights", "sub/config.json", ".gitignore"])
def test_a_single_flipped_bit_is_found_and_named(signed: Path, trust: Trust, name: str) -> None:
    original = (signed / name).read_bytes()
    for at in {0, len(original) // 2, len(original) - 1}:
        changed = bytearray(original)
        changed[at] ^= 1
        (signed / name).write_bytes(changed)
        with raises(Code.CORRUPT, name):
            verify(signed, trust)


def test_added_missing_and_unsigned(signed: Path, trust: Trust, key: Path) -> None:
    (signed / "extra").write_text("x")
    (signed / "weights").unlink()
    with raises(Code.CORRUPT, "extra was added", "weights is missing"):
        verify(signed, trust)
    (signed / "model.sig").unlink()
    with raises(Code.UNTRUSTED, "model.sig"):
        verify(signed, trust)
    with raises(Code.MISSING_OPTION):
        sign(signed, Signer(key))
        verify(signed, Trust())


def test_the_signature_itself_is_not_overlooked(signed: Path, trust: Trust) -> None:
    """Every flipped bit is detected, except where JSON and base64 ignore it."""
    path = signed / "model.sig"
    original = path.read_bytes()
    sound = verify(signed, trust)
    for at in range(0, len(original), 37):
        changed = bytearray(original)
        changed[at] ^= 1
        path.write_bytes(changed)
        try:
            assert verify(signed, trust) == sound  # same list of files, same signature
        except UserError as error:
            assert "model.sig" in str(error)
    path.write_bytes(original[: len(original) // 2])
    with raises(Code.MALFORMED, "model.sig"):
        verify(signed, trust)


def test_another_key_is_refused(signed: Path, tmp_path: Path, trust: Trust) -> None:
    other = generate(tmp_path / "other.pem")
    with raises(Code.UNTRUSTED, "model.sig"):
        verify(signed, Trust((other,)))
    assert verify(signed, Trust((other, *trust.keys))) == 3


def test_the_tool_of_the_format_reads_it(signed: Path, key: Path) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(signed)]
    command += ["--signature", str(signed / "model.sig")]
    command += ["--no-ignore-git-paths", "--public_key", str(key.with_suffix(".pub"))]
    subprocess.run(command, check=True, capture_output=True)
    (signed / "weights").write_bytes(b"")
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_an_encrypted_key_asks_for_its_password(
    folder: Path, key: Path, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    encryption = BestAvailableEncryption(b"secret")
    encrypted = load_private(key).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    key.write_bytes(encrypted)
    with raises(Code.INVALID_VALUE, PASSWORD):
        sign(folder, Signer(key))
    monkeypatch.setenv(PASSWORD, "wrong")
    with raises(Code.INVALID_VALUE, key):
        sign(folder, Signer(key))
    monkeypatch.setenv(PASSWORD, "secret")
    sign(folder, Signer(key))
    assert verify(folder, trust) == 3


@pytest.mark.parametrize("text", ["", "not a key", "-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_an_invalid_key_is_one_error(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.pem").write_text(text)
    with raises(Code.INVALID_VALUE, "bad.pem"):
        sign(folder, Signer(tmp_path / "bad.pem"))
    with raises(Code.UNTRUSTED, folder):  # it is not signed either
        verify(folder, Trust((tmp_path / "bad.pem",)))
    assert not (folder / "model.sig").exists()


def test_a_key_pair_never_replaces_a_file(key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    with raises(Code.EXISTS, key):
        generate(key)
    assert key.read_bytes() == before


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """Paths of a certificate, its key, its root, and a foreign root."""
    root_key, leaf_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    certificates = {
        "root": _certificate("root", root_key, root_key, "root", is_root=True),
        "leaf": _certificate("signer", leaf_key, root_key, "root", is_root=False),
        "stranger": _certificate("stranger", leaf_key, leaf_key, "stranger", is_root=True),
    }
    paths = {name: tmp_path / f"{name}.crt" for name in certificates}
    for name, certificate in certificates.items():
        paths[name].write_bytes(certificate.public_bytes(Encoding.PEM))
    paths["key"] = tmp_path / "leaf.pem"
    secret = leaf_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    paths["key"].write_bytes(secret)
    return paths


def test_a_certificate_below_a_trusted_root(
    folder: Path, tmp_path: Path, paths: dict[str, Path]
) -> None:
    sign(folder, Signer(paths["key"], paths["leaf"], (paths["root"],)))
    assert verify(folder, Trust(roots=(paths["root"],))) == 3
    with raises(Code.UNTRUSTED, "model.sig"):
        verify(folder, Trust(roots=(paths["stranger"],)))
    generate(tmp_path / "another.pem")
    for certificate in (paths["leaf"], tmp_path / "absent.crt", tmp_path / "another.pem"):
        with raises(Code.INVALID_VALUE, folder):
            sign(folder, Signer(tmp_path / "another.pem", certificate))
    assert verify(folder, Trust(roots=(paths["root"],))) == 3  # the earlier signature is unchanged


def test_the_folders_signature_covers_unsigned_steps(
    made: AttestedRun, tmp_path: Path, paths: dict[str, Path]
) -> None:
    lines = (made.onnx / ATTESTATIONS).read_text().splitlines()
    unsigned = [json.dumps({**json.loads(line), "signatures": []}) for line in lines]
    (made.onnx / ATTESTATIONS).write_text("\n".join(unsigned) + "\n")
    sign(made.onnx, Signer(paths["key"], paths["leaf"], (paths["root"],)))
    command = ["verify", str(made.onnx), "--chain"]
    verified = CliRunner().invoke(app, [*command, "--root", str(paths["root"])])
    assert verified.exit_code == 0 and "corpus.txt" in verified.output
    by_key = CliRunner().invoke(
        app, [*command, "--root", str(paths["root"]), "--key", str(made.public)]
    )
    assert "line 1: not signed" in str(by_key.exception)
    sign(made.onnx, Signer(paths["key"], paths["leaf"], (paths["root"],)), [ATTESTATIONS])
    without = CliRunner().invoke(app, [*command, "--root", str(paths["root"])])
    assert "line 1: not signed" in str(without.exception)


def test_without_a_network_nobody_signs_without_a_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))  # hides what Sigstore has cached
    with raises(Code.UNAUTHORIZED, folder):
        sign(folder, Signer())
    assert not (folder / "model.sig").exists()


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    issuer: str,
    is_root: bool,
) -> x509.Certificate:
    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    today = datetime.now(UTC)
    usage = x509.KeyUsage(
        digital_signature=not is_root,
        key_cert_sign=is_root,
        crl_sign=is_root,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - timedelta(days=1))
        .not_valid_after(today + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if not is_root:
        purposes = [x509.ExtendedKeyUsageOID.CODE_SIGNING]
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
