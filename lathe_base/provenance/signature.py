"""The signature of a folder, by OpenSSF Model Signing (https://github.com/sigstore/model-transparency)."""

import base64
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lathe_base.errors import Code, UserError
from lathe_base.provenance.keys import load_private, load_verifier, password
from lathe_base.storage import atomic_file, sha256
from lathe_base.storage.files import files_below
from lathe_base.storage.objects import MARKER
from lathe_base.storage.ownership import SIGNATURE

if TYPE_CHECKING:
    from model_signing import hashing, signing, verifying

MAX_SHOWN = 3  # names in a message
MISMATCH = "Signature mismatch"
"""Beginning of the library's message about files that differ from a valid signature's list."""

HINT = "get the folder again from where it was signed"


@dataclass(frozen=True)
class Signer:
    """A signer: a private key, optionally with an X.509 certificate for it, or otherwise a Sigstore
    identity (keyless, over the network)."""

    key: Path | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()

    @property
    def hint(self) -> str:
        """A hint for when signing fails."""
        if self.key is None:
            return "sign with --key, or with network access to Sigstore and an identity it supports"
        return (
            "give an X.509 certificate of this key in PEM, and intermediate certificates with "
            "--chain"
        )

    def config(self) -> "signing.Config":
        """The library's signer; raises UserError for an unusable key."""
        from model_signing import signing

        config = signing.Config()
        if self.key is None:
            return config.use_sigstore_signer()
        load_private(self.key)
        if self.certificate is None:
            # The library declares a string, but passes it to OpenSSL, which takes bytes.
            passphrase: Any = (password() or "").encode() or None
            return config.use_elliptic_key_signer(private_key=self.key, password=passphrase)
        return config.use_certificate_signer(
            private_key=self.key,
            signing_certificate=self.certificate,
            certificate_chain=self.chain,
        )


@dataclass(frozen=True)
class Trust:
    """The trusted signers: any of some public keys, certificates below a root, or an identity at an
    OpenID issuer."""

    keys: tuple[Path, ...] = ()
    roots: tuple[Path, ...] = ()
    identity: str | None = None
    issuer: str | None = None

    def configs(self) -> "list[verifying.Config]":
        """The library's verifiers, at least one of which has to accept a signature.

        Raises:
            UserError: no trusted signer is given, or a key is unusable.
        """
        from model_signing.verifying import Config

        for key in self.keys:
            load_verifier(key)
        verifiers = [Config().use_elliptic_key_verifier(public_key=key) for key in self.keys]
        if self.roots:
            verifiers.append(Config().use_certificate_verifier(certificate_chain=self.roots))
        if self.identity and self.issuer:
            identity, issuer = self.identity, self.issuer
            verifiers.append(Config().use_sigstore_verifier(identity=identity, oidc_issuer=issuer))
        if not verifiers:
            raise UserError(
                "no trusted keys are given",
                "give --key PUBLIC.pub, --root ROOT.pem, or both --identity and --issuer",
                Code.MISSING_OPTION,
            )
        return verifiers


def sign(folder: Path, signer: Signer, ignored: Collection[str] = ()) -> Path:
    """Sign all files of a folder; writes and returns `model.sig` in it.

    Args:
        ignored: names of files that are not signed, such as logs.

    Raises:
        UserError: no such folder, or an unusable key.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder", "give a model folder", Code.NOT_FOUND)
    hashing = _hashing([SIGNATURE, MARKER, *ignored])
    with atomic_file(folder / SIGNATURE) as work:  # it appears after the files have been read
        try:
            signer.config().set_hashing_config(hashing).sign(folder, work)
        except UserError:
            raise
        except Exception as error:  # of Sigstore's client, or of a parser of certificates
            if signer.key and not signer.certificate:
                raise  # `config` has checked the key, so this is a bug and keeps its traceback
            raise UserError(
                f"{folder}: cannot be signed: {_first_line(error)}",
                signer.hint,
                Code.INVALID_VALUE if signer.certificate else Code.UNAUTHORIZED,
            ) from error
    return folder / SIGNATURE


def verify(folder: Path, trust: Trust) -> int:
    """Check every file of a folder against its signature; returns the number of signed files.

    Raises:
        UserError: no signature, an untrusted signer, or a file was changed, added or removed; names
            the file.
    """
    path = folder / SIGNATURE
    if not folder.exists():
        raise UserError(
            f"{folder}: no such folder", "give the output of a Lathe step", Code.NOT_FOUND
        )
    if not path.is_file():
        raise UserError(
            f"{folder}: not signed: no {SIGNATURE}", "sign it with `lathe sign`", Code.UNTRUSTED
        )
    failures = []
    for config in trust.configs():
        try:
            config.set_hashing_config(_hashing([SIGNATURE])).verify(folder, path)
            return len(_resources(path))
        except Exception as error:  # the library raises whatever its parsers and OpenSSL raise
            failures.append(error)
    # One verifier may have accepted the signature and found other files, which says more than that
    # the others did not accept it.
    failures.sort(key=lambda error: not str(error).startswith(MISMATCH))
    if str(failures[0]).startswith(MISMATCH):
        wrong = list(_differences(folder, path))
        more = f" and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        why, code = (
            f"changed since it was signed: {', '.join(wrong[:MAX_SHOWN])}{more}",
            Code.CORRUPT,
        )
    else:
        try:
            _resources(path)
            reason = _first_line(failures[0])
            why = f"{SIGNATURE} is not by a trusted signer, or is corrupt ({reason})"
            code = Code.UNTRUSTED
        except (ValueError, KeyError, TypeError):
            why, code = f"{SIGNATURE} is corrupt", Code.MALFORMED
    raise UserError(f"{folder}: {why}", HINT, code)


def _differences(folder: Path, signature: Path) -> Iterator[str]:
    """Yield what is wrong with each file that is not as it was when it was signed."""
    signed = {resource["name"]: resource["digest"] for resource in _resources(signature)}
    serialization = _payload(signature)["predicate"]["serialization"]
    ignored = {SIGNATURE, *serialization.get("ignore_paths", [])}
    paths = {name: path for name, path in files_below(folder) if name not in ignored}
    for name in sorted(signed.keys() | paths.keys()):
        if name not in paths:
            yield f"{name} is missing"
        elif name not in signed:
            yield f"{name} was added"
        elif sha256(paths[name]) != signed[name]:
            yield f"{name} was changed"


def _hashing(ignored: Collection[str]) -> "hashing.Config":
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=ignored, ignore_git_paths=False)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def signed_files(folder: Path) -> set[str]:
    """The names of the files that a folder's signature covers, valid or not."""
    return {resource["name"] for resource in _resources(folder / SIGNATURE)}


def _resources(signature: Path) -> list[dict[str, str]]:
    resources: list[dict[str, str]] = _payload(signature)["predicate"]["resources"]
    return resources


def _payload(signature: Path) -> dict[str, Any]:
    bundle = json.loads(signature.read_bytes())
    values: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return values
