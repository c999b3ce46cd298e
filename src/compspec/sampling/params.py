"""Sampling parameters of one request. Names and meanings follow vLLM where vLLM has them."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compspec.errors import RequestError

MAX_SEED = 2**63 - 1


def describe_validation_error(error: ValidationError, valid: list[str], what: str) -> str:
    """One line for the first problem pydantic found; lists the valid names when one is unknown."""
    errors = error.errors()
    first = next((item for item in errors if item["type"] == "extra_forbidden"), errors[0])
    # An unknown name can hold anything, a line break included.
    path = ".".join(str(part).encode("unicode_escape").decode() for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown {what} '{path}'; valid are: {', '.join(valid)}"
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return message
    given = repr(first["input"])
    given = given if len(given) <= 60 else given[:57] + "..."
    return f"{what} '{path}': {message} (given: {given})"


class SamplingParams(BaseModel):
    """How one request is sampled and when it ends.

    Attributes:
        max_tokens: the output has at most this many tokens (exactly as many if nothing else ends it; an
            output also ends where prompt and output fill the model's length).
        temperature: 0 is greedy; otherwise logits are divided by it; at most 1e5.
        top_k: sample among the k most likely tokens; 0 for all. Ties at the k-th place are all kept.
        top_p: sample among the fewest most likely tokens whose probability reaches this; in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one; in [0, 1].
        repetition_penalty: > 0; divides positive logits and multiplies negative ones of tokens that are in
            the prompt or the output so far (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence in the output so far.
        seed: makes sampling reproducible; None draws one when the request is submitted.
        stop_token_ids: tokens that end the output, beside the model's EOS.
        ignore_eos: do not end at the model's EOS tokens.
        speculative: None for the engine's setting, False for no drafts, a number for at most so many per step.
            Changes the speed alone.

    Raises:
        RequestError: for a value out of range, NaN, or an unknown name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    ignore_eos: bool = False
    speculative: Annotated[int, Field(ge=1)] | Literal[False] | None = None

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            names = list(type(self).model_fields)
            raise RequestError(describe_validation_error(error, names, "sampling parameter")) from None

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _factors_fit_float32(self) -> "SamplingParams":
        # Beyond these, a quotient or product of ordinary logits leaves fp32, and -inf / inf is NaN.
        smallest, largest = 1e-5, 1e5
        if self.temperature and not smallest <= self.temperature <= largest:
            raise ValueError(
                f"temperature {self.temperature} is not between {smallest} and {largest}; use 0 for greedy"
            )
        if not smallest <= self.repetition_penalty <= largest:
            raise ValueError(f"repetition_penalty {self.repetition_penalty} is not between {smallest} and {largest}")
        return self

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties changes a logit."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is added."""
        return self.temperature == 0.0

    @property
    def log_min_p(self) -> float:
        """The margin below the largest logit (after temperature) at which min_p cuts; -inf for none."""
        return math.log(self.min_p) if self.min_p > 0.0 else -math.inf
