"""A model's recommended sampling parameters, as in Hugging Face's `generation_config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lathe_base.artifacts.kinds import checked, read_json
from lathe_base.config.settings import GenerationSettings
from lathe_base.config.settings.types import generation_bounds

GENERATION = "generation_config.json"
HINT = "copy the checkpoint again"


class SamplingDefaults(BaseModel):
    """The parameters that a model's authors recommend.

    Attributes:
        do_sample: whether to sample; False: greedy.
        top_k: number of candidates; 0 and -1: all.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    # Transformers takes 0 for greedy decoding, and -1 for no limit, where a request may not.
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, generation_bounds("min_p")] | None = None
    repetition_penalty: (
        Annotated[float, generation_bounds("repetition_penalty"), Field(allow_inf_nan=False)] | None
    ) = None

    def to_json(self) -> dict[str, Any]:
        """The keys of `generation_config.json`, without those that are not set."""
        return self.model_dump(exclude_none=True)

    def complete(self, generation: GenerationSettings) -> GenerationSettings:
        """The settings, with these in place of those that the recipe leaves out; `min_p` is not
        among them."""
        explicit = generation.model_fields_set
        values = self.model_dump(exclude_none=True, exclude={"do_sample", "min_p"})
        # Greedy in any of Hugging Face's three ways. A recipe that sets a temperature, or asks for
        # several texts, samples all the same.
        if self.do_sample is False or 0 in (self.temperature, self.top_p):
            values.pop("temperature", None)
            values.pop("top_p", None)
            if generation.num_return_sequences == 1 and "temperature" not in explicit:
                values["decode_strategy"] = "greedy_search"
        if "top_k" in values:
            values["top_k"] = max(values["top_k"], 0)
        return generation.model_copy(
            update={key: value for key, value in values.items() if key not in explicit}
        )

    def for_requests(self) -> dict[str, Any]:
        """The parameters as a request gives them: greedy as a temperature of 0."""
        values = self.model_dump(exclude_none=True, exclude={"do_sample"})
        if self.do_sample is False or self.top_p == 0:
            values["temperature"] = 0.0
        return values


UNSET = SamplingDefaults()


def sampling_defaults(values: Mapping[str, Any], source: str) -> SamplingDefaults:
    """Select the parameters in the values of a `generation_config.json`; other keys are ignored.

    Raises:
        UserError: an invalid value; names `source`.
    """
    known = {key: value for key, value in values.items() if key in SamplingDefaults.model_fields}
    return checked(known, SamplingDefaults, source, HINT)


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read the parameters of a Hugging Face folder; unset without a `generation_config.json`.

    Raises:
        UserError: it is broken.
    """
    path = folder / GENERATION
    values = read_json(path, HINT) if path.is_file() else {}
    return sampling_defaults(values, str(path))
