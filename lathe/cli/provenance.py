"""Verbs that sign what Lathe writes, and check it."""

from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import RUN, input_argument
from lathe.console import show

Signed = Annotated[Path, input_argument("Folder of a checkpoint, an export or a release.")]
Keys = Annotated[
    list[Path] | None,
    typer.Option("--key", metavar="PUBLIC", help="A public key to trust; may be repeated."),
]


@app.command(epilog="Example: lathe keygen signing.pem")
def keygen(
    private: Annotated[Path, typer.Argument(help="File of the private key to write.")],
) -> None:
    """Make a key pair to sign with: PRIVATE, and beside it the public key, NAME.pub.

    `openssl ecparam -name prime256v1 -genkey -noout -out key.pem` makes such a private key as well.
    """
    from lathe.provenance.keys import SIGNING_KEY, generate

    public = generate(private)
    show(private=private, public=public, sign_every_step=f"export {SIGNING_KEY}={private}")


@app.command(epilog="Example: lathe sign run/int8-onnx --key signing.pem")
def sign(
    folder: Signed = RUN / "int8-onnx",
    key: Annotated[
        Path | None, typer.Option(help="The private key, in PEM; Sigstore's keyless way without.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="An X.509 certificate of the key, for `verify --root`.")
    ] = None,
    chain: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="A certificate between that and the root; may be repeated."
        ),
    ] = None,
) -> None:
    """Sign a folder, and the attestations in it that nobody has signed.

    The signature is model.sig, in the format of OpenSSF Model Signing. By signing, you vouch for
    the whole history that the attestations tell, those of earlier steps included. Steps that run
    with the environment variable LATHE_SIGNING_KEY sign what they write themselves.
    """
    from lathe.provenance.bundle import sign_unsigned
    from lathe.provenance.signature import Signer
    from lathe.provenance.step import sign_model

    attestations = sign_unsigned(folder, key) if key else 0
    signature = sign_model(folder, Signer(key, certificate, tuple(chain or ())))
    show(signature=signature, attestations_signed=attestations)


@app.command(epilog="Example: lathe verify run/int8-onnx --key signing.pub --chain")
def verify(
    folder: Annotated[
        Path, input_argument("What a step wrote: a folder, a verdict or a certificate.")
    ] = RUN / "int8-onnx",
    key: Keys = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Check every step back to the corpus as well.")
    ] = False,
    root: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A root certificate to trust; may be repeated."),
    ] = None,
    identity: Annotated[
        str | None, typer.Option(help="Who signed with Sigstore, such as a mail address.")
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(help="The OpenID issuer that knows this identity.")
    ] = None,
) -> None:
    """Check what was signed: which files of a folder were changed, added or removed since.

    Data sets, evaluations, verdicts and certificates have no signature of their own: their files
    are checked with the signed statement of the step that wrote them, and the steps behind it.

    With --chain it also checks that every step since the corpus is attested by one of the keys, and
    prints the family tree. Without a key, as with --root, the steps are those that the signer of
    the folder vouches for. Status 2 where anything does not hold.
    """
    from lathe.provenance.chain import family_tree, verify_chain
    from lathe.provenance.signature import Trust, signed_files
    from lathe.provenance.signature import verify as verify_signature
    from lathe.provenance.step import has_signature
    from lathe.storage.attested import ATTESTATIONS

    keys = tuple(key or ())
    is_vouched_for, step = False, None
    if has_signature(folder):
        files = verify_signature(folder, Trust(keys, tuple(root or ()), identity, issuer))
        is_vouched_for = not keys and ATTESTATIONS in signed_files(folder)
    else:
        step = verify_chain(folder, keys)
        files = len(step.statement.products)
    if chain:
        step = step or verify_chain(folder, keys, is_vouched_for)
    show(verified=folder, files=files)
    if chain and step:
        from rich.console import Console

        Console(soft_wrap=True).print(family_tree(step))
