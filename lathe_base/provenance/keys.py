"""Elliptic-curve key pairs in PEM files, as OpenSSL writes them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lathe_base.errors import Code, UserError
from lathe_base.inputs import read_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from securesystemslib.signer import CryptoSigner, SSlibKey

SIGNING_KEY = "LATHE_SIGNING_KEY"
"""Environment variable: file of the private key with which stages sign."""

PASSWORD = "LATHE_SIGNING_KEY_PASSWORD"
"""Environment variable: the password of an encrypted private key."""

MOUNTED = Path("/var/run/lathe/signing")
"""Mount path of the Secret `lathe-signing` in pods, if it exists: `key.pem`, and `password` if the
key is encrypted."""

TRUSTED = "LATHE_VERIFICATION_KEYS"
"""Environment variable: the folder of trusted public keys, `*.pub`, if the recipe names none."""

TRUSTED_MOUNTED = Path("/var/run/lathe/keys")
"""Mount path of the ConfigMap `lathe-verification-keys` in pods, if it exists."""

CURVES = ("secp256r1", "secp384r1", "secp521r1")
HOW = "create a key pair with `lathe keygen key.pem`"


def generate(private: Path) -> Path:
    """Make a key pair: the private key (mode 600), and next to it the public one with the suffix
    `.pub`, whose path is returned.

    Raises:
        UserError: one of the files exists.
    """
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec

    public = public_path(private)
    for path in (private, public):
        if path.exists():
            raise UserError(f"{path}: exists", "give another name, or move it away", Code.EXISTS)
    key = ec.generate_private_key(ec.SECP256R1())
    private.parent.mkdir(parents=True, exist_ok=True)
    # The file has its mode from the start, and is never one that somebody else has put there.
    secret = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    public_format = pem.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, public_format))
    return public


def public_path(private: Path) -> Path:
    """Path of the public key that `generate` writes."""
    return private.with_suffix(".pub")


def signing_key() -> Path | None:
    """The file of the private key: from the environment, or mounted into this pod; None if outputs
    are not signed."""
    if name := os.environ.get(SIGNING_KEY):
        return Path(name)
    mounted = MOUNTED / "key.pem"
    return mounted if mounted.is_file() else None


def password() -> str | None:
    """The password of the private key, from the same source as the key."""
    mounted = MOUNTED / "password"
    if SIGNING_KEY not in os.environ and mounted.is_file():
        return read_text(mounted, "set it to the key's password").strip()
    return os.environ.get(PASSWORD)


def trusted_keys(named: Sequence[str] = ()) -> list[Path]:
    """The public keys to verify with: those named, else those in the environment's folder, else
    those mounted into this pod."""
    folder = Path(os.environ.get(TRUSTED) or TRUSTED_MOUNTED)
    return [Path(key) for key in named] or sorted(folder.glob("*.pub"))


def load_signer(private: Path) -> "CryptoSigner":
    """A signer of DSSE envelopes with a private key.

    Raises:
        UserError: no such file, not a private key, a wrong password, or an unsupported kind of key.
    """
    from securesystemslib.signer import CryptoSigner

    return CryptoSigner(load_private(private))


def load_private(path: Path) -> "EllipticCurvePrivateKey":
    """A private key; raises as `load_signer`."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    text, passphrase = read_text(path, f"give a private key in PEM; {HOW}").encode(), password()
    try:
        key = load_pem_private_key(text, passphrase.encode() if passphrase else None)
    except (ValueError, TypeError) as error:
        # The library has no exception of its own for a missing or a wrong password.
        encrypted = "encrypted" in str(error).lower() or "password" in str(error).lower()
        hint = f"set {PASSWORD}" if encrypted else f"give a private key in PEM; {HOW}"
        raise UserError(
            f"{path}: not a usable private key: {error}", hint, Code.INVALID_VALUE
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in CURVES:
        raise UserError(
            f"{path}: not an elliptic-curve key of {', '.join(CURVES)}", HOW, Code.UNSUPPORTED
        )
    return key


def load_verifier(public: Path) -> "SSlibKey":
    """A verifier of DSSE envelopes with a public key or an X.509 certificate.

    Raises:
        UserError: no such file, or neither of the two.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from cryptography.x509 import load_pem_x509_certificate
    from securesystemslib.signer import SSlibKey

    hint = "give the public key that `lathe keygen` wrote beside the private key"
    text = read_text(public, hint).encode()
    try:
        is_certificate = b"BEGIN CERTIFICATE" in text
        key = (
            load_pem_x509_certificate(text).public_key()
            if is_certificate
            else load_pem_public_key(text)
        )
    except ValueError:
        raise UserError(
            f"{public}: not a public key or certificate in PEM", hint, Code.INVALID_VALUE
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise UserError(
            f"{public}: not an elliptic-curve key of {', '.join(CURVES)}", HOW, Code.UNSUPPORTED
        )
    return SSlibKey.from_crypto(key)
