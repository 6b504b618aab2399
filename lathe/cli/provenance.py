"""Commands that sign Lathe's outputs, verify them, and prove properties by repeating work."""

from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    RUN,
    Data,
    Output,
    Overrides,
    RecipeName,
    as_options,
    input_argument,
    load,
    output_option,
)
from lathe_base.console import show
from lathe_base.errors import Code, StageError, UserError

Signed = Annotated[Path, input_argument("Folder with a checkpoint, export or release.")]
Keys = Annotated[
    list[Path] | None,
    typer.Option("--key", metavar="PUBLIC", help="Trusted public key; may be repeated."),
]


@app.command(epilog="Example: lathe keygen signing.pem")
def keygen(
    private: Annotated[Path, typer.Argument(help="Output file of the private key.")],
) -> None:
    """Create a signing key pair: the private key PRIVATE, and the public key NAME.pub beside it.

    Keys made by `openssl ecparam -name prime256v1 -genkey -noout -out key.pem` work too.
    """
    from lathe_base.provenance.keys import SIGNING_KEY, generate

    if ":/" in str(private):  # an address, whose second slash the path has lost
        raise UserError(
            "keys are written to this machine only",
            "give the name of a new file",
            Code.INVALID_VALUE,
        )
    public = generate(private)
    show(private=private, public=public, sign_every_step=f"export {SIGNING_KEY}={private}")


@app.command(epilog="Example: lathe sign run/int8-onnx --key signing.pem")
def sign(
    folder: Signed = RUN / "int8-onnx",
    key: Annotated[
        Path | None,
        typer.Option(help="Private key in PEM format. Default: Sigstore's keyless signing."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="X.509 certificate of the key, for `verify --root`.")
    ] = None,
    chain: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Intermediate certificate between it and the root; may be repeated.",
        ),
    ] = None,
) -> None:
    """Sign a folder and its unsigned attestations.

    The signature is model.sig, in the OpenSSF Model Signing format. By signing, you vouch for the
    whole attested history, including earlier steps. Steps that run with the environment variable
    LATHE_SIGNING_KEY sign their own outputs.
    """
    from lathe_base.provenance.bundle import sign_unsigned
    from lathe_base.provenance.signature import Signer
    from lathe_base.provenance.step import sign_model

    attestations = sign_unsigned(folder, key) if key else 0
    signature = sign_model(folder, Signer(key, certificate, tuple(chain or ())))
    show(signature=signature, attestations_signed=attestations)


@app.command(epilog="Example: lathe verify run/int8-onnx --key signing.pub --chain")
def verify(
    folder: Annotated[
        Path, input_argument("Output of a step: a folder, a verdict or a certificate.")
    ] = RUN / "int8-onnx",
    key: Keys = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Also verify every step back to the corpus.")
    ] = False,
    root: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Trusted root certificate; may be repeated."),
    ] = None,
    identity: Annotated[
        str | None, typer.Option(help="Sigstore identity of the signer, such as an email address.")
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(help="OpenID Connect issuer of this identity.")
    ] = None,
) -> None:
    """Verify signatures: detect files changed, added or removed since signing.

    Data sets, evaluations, verdicts and certificates have no signature of their own: their files
    are checked against the signed statement of the step that wrote them, and against the steps
    before it.

    With --chain it also verifies that every step since the corpus is attested by one of the keys,
    and prints the lineage. Without a key, as with --root, it accepts the steps that the folder's
    signer vouches for. The exit status is 2 if any check fails.
    """
    from lathe_base.provenance.chain import family_tree, verify_chain
    from lathe_base.provenance.signature import Trust, signed_files
    from lathe_base.provenance.signature import verify as verify_signature
    from lathe_base.provenance.step import has_signature
    from lathe_base.storage.ownership import ATTESTATIONS

    # A model has a signature of all its files. Other outputs have the signed statement of the step
    # that wrote them, so that only the chain of statements says anything about them.
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


@app.command(
    "certify-resume",
    epilog="Example: lathe certify-resume -r small -o Engine.max_steps=200 --data run/data",
)
def certify_resume(
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of times to kill the training.")] = 20,
    seed: Annotated[int, typer.Option(help="Random seed for the kills.")] = 0,
    output: Annotated[Path, output_option("Output JSON file with the certificate.")] = RUN
    / "certificate.json",
) -> None:
    """Prove that killed and resumed training produces exactly the same model.

    Trains the recipe once without interruption, and once while killing its processes with SIGKILL
    (one rank, all of them, or in the middle of a save) and restarting them. The certificate lists
    every kill and the SHA-256 of every tensor of both models; the exit status is 1 if they differ.
    It is signed if LATHE_SIGNING_KEY names a key. The option --certificate of `lathe report`
    includes it in a report.
    """
    settings = load(recipe, override)
    from lathe.release.certify.resume import certify_resume

    options = ["--recipe", recipe, *as_options(override)]
    result = certify_resume(settings, options, data, output, kills, seed)
    show(kills=len(result.kills), passed=result.passed, certificate=output)
    result.require()


@app.command(epilog="Example: lathe rebuild run/int8-onnx --key signing.pub --output rebuilt")
def rebuild(
    folder: Annotated[
        Path, input_argument("Folder with a data set, checkpoint, export or release.")
    ] = (RUN / "int8-onnx"),
    key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PUBLIC",
            help="Public key to verify the attestations with; may be repeated. Without one, "
            "attestations are not verified.",
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="New location of the corpus, if it has moved; may be repeated.",
        ),
    ] = None,
    output: Output = RUN / "rebuilt",
) -> None:
    """Rebuild a folder from its attested steps, and compare the bytes.

    The steps run with their attested recipes, seeds and threads. On the same kind of CPU with the
    same libraries, an INT8 ONNX file gets the same SHA-256. A rebuild stops at the first step
    whose output differs, with exit status 1, and names the first tensor that differs. A killed
    rebuild resumes.
    """
    from lathe.release.certify.rebuild import rebuild

    done = rebuild(folder, output, tuple(key or ()), tuple(corpus or ()))
    for result in done:
        files = ", ".join(result.different or result.same) or "nothing to compare"
        show(**{result.step: f"{'DIFFERENT' if result.different else 'the same'}: {files}"})
    if done[-1].different:
        raise StageError(
            f"the output of `{done[-1].step}` differs. {done[-1].detail}", Code.MISMATCH
        )
