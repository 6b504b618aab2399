"""DSSE envelopes of statements (https://github.com/secure-systems-lab/dsse), a JSON line each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake
from lathe_base.provenance.statement import Statement
from lathe_base.storage import digest

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner, SSlibKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
AGAIN = "copy the folder again, or run the step that wrote it again"


@dataclass(frozen=True)
class Attestation:
    """A statement in its envelope.

    Attributes:
        line: the envelope as JSON.
        where: file and line, for messages.
    """

    line: str
    where: str

    @cached_property
    def envelope(self) -> "Envelope":
        """The envelope; raises UserError if the line is not one."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.exceptions import FormatError

        try:
            parsed = Envelope.from_dict(json.loads(self.line))
        except (ValueError, KeyError, TypeError, AttributeError, FormatError) as error:
            raise UserError(
                f"{self.where}: not a DSSE envelope ({error})", AGAIN, Code.MALFORMED
            ) from None
        if parsed.payload_type != PAYLOAD_TYPE:
            raise UserError(
                f"{self.where}: {parsed.payload_type}, not {PAYLOAD_TYPE}", AGAIN, Code.WRONG_KIND
            )
        return parsed

    @cached_property
    def statement(self) -> Statement:
        """The statement, whether signed or not; raises UserError if it is not one of Lathe's."""
        from google.protobuf import json_format
        from in_toto_attestation.v1 import statement as in_toto
        from in_toto_attestation.v1 import statement_pb2

        payload = self.envelope.payload
        try:
            message = json_format.Parse(payload, statement_pb2.Statement())
            in_toto.Statement.copy_from_pb(message).validate()
            return Statement.model_validate_json(payload)
        except ValidationError as error:
            what = first_mistake(error)
        except (ValueError, json_format.ParseError) as error:
            what = str(error)
        raise UserError(
            f"{self.where}: not a statement of a Lathe step ({what})", AGAIN, Code.WRONG_KIND
        )

    @property
    def is_signed(self) -> bool:
        """Whether there is a signature, valid or not."""
        return bool(self.envelope.signatures)

    @cached_property
    def identity(self) -> str:
        """Digest of the statement."""
        return digest(self.envelope.payload.decode("utf-8", "surrogateescape"))

    def is_signed_by(self, keys: "Sequence[SSlibKey]") -> bool:
        """Whether one of these keys has signed it."""
        from securesystemslib.exceptions import VerificationError

        try:
            return bool(self.envelope.verify(list(keys), 1))
        except (VerificationError, ValueError):
            return False

    def signed(self, signer: "CryptoSigner") -> "Attestation":
        """A copy with a signature by this signer."""
        self.envelope.sign(signer)
        return Attestation(_line(self.envelope), self.where)


def seal(statement: Statement, signer: "CryptoSigner | None", where: str) -> Attestation:
    """Put a statement into an envelope, and sign it if there is a signer."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(statement.to_json(), PAYLOAD_TYPE, {})
    if signer:
        envelope.sign(signer)
    return Attestation(_line(envelope), where)


def _line(envelope: "Envelope") -> str:
    values: dict[str, Any] = envelope.to_dict()
    return json.dumps(values, separators=(",", ":"))
