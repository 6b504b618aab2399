"""Signed provenance of artifacts: attestations of steps, their chain, and folder signatures.

Every stage writes `provenance.intoto.jsonl` into its output folder: an in-toto statement with a
SLSA provenance predicate (https://slsa.dev/spec/v1.0/provenance) in a DSSE envelope, one for the
step itself and one for each step before it, so that a single folder shows its whole history. With a
signing key in the environment variable LATHE_SIGNING_KEY the envelopes are signed, and so are
models, by an OpenSSF Model Signing signature in `model.sig`.
"""
