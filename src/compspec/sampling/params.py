"""Sampling parameters of one request. Names and meanings follow vLLM where vLLM has them."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from compspec.errors import RequestError

MAX_SEED = 2**63 - 1

TokenId = Annotated[int, Field(ge=0)]

LogitsProcessor = Callable[..., Any]
"""(token_ids: list[int], logits: Tensor [V] float32) -> Tensor [V]."""


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
    given = " ".join(repr(first["input"]).split())
    given = given if len(given) <= 60 else given[:57] + "..."
    return f"{what} '{path}': {message} (given: {given})"


def _bad_word(word: Any) -> Any:
    if isinstance(word, str) and word:
        return word
    is_ids = isinstance(word, list | tuple) and all(type(token) is int and token >= 0 for token in word)
    if not is_ids or not word:
        raise ValueError(f"a bad word is a text or a list of token ids, neither of them empty, given: {word!r}")
    return tuple(word)


class SamplingParams(BaseModel):
    """How one request is sampled and when it ends.

    Logits pass, in this order: `logit_bias`, the penalties, `logits_processors`, what is forbidden
    (`bad_words`, `min_tokens`, `allowed_token_ids`), temperature, top_k, top_p, min_p. Every row of a verification
    window is treated as if the drafts before it were output already.

    Attributes:
        max_tokens: the output has at most this many tokens (exactly as many if nothing else ends it; an
            output also ends where prompt and output fill the model's length).
        min_tokens: so many tokens come before anything but the length ends the output: until then EOS and
            `stop_token_ids` are not sampled, and `stop` strings are not looked for.
        temperature: 0 is greedy; otherwise logits are divided by it; at most 1e5.
        top_k: sample among the k most likely tokens; 0 for all. Ties at the k-th place are all kept.
        top_p: sample among the fewest most likely tokens whose probability reaches this; in (0, 1].
        min_p: drop tokens less likely than this share of the most likely one; in [0, 1].
        repetition_penalty: > 0; divides positive logits and multiplies negative ones of tokens that are in
            the prompt or the output so far (CTRL, arXiv 1909.05858).
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence in the output so far.
        logit_bias: token id -> number in [-100, 100] that is added to its logit.
        bad_words: texts that are never generated, or lists of token ids. A text is banned as it is tokenised alone
            and after a space. Of several tokens the last is forbidden where the others stand before it,
            in the prompt or in the output.
        allowed_token_ids: nothing else is sampled.
        logits_processors: functions (token_ids, logits) -> logits of one row: prompt and output up to that
            row, and float32 logits [V], which may be changed in place. Called for every row, those of drafts that may
            be rejected included, so a processor must be a function of its arguments. If one raises at a token that
            is reached, its request alone ends, with finish_reason `error`.
        stop: texts that end the output; the text ends before the first of them.
        stop_token_ids: tokens that end the output, beside the model's EOS; the text ends before them.
        ignore_eos: do not end at the model's EOS tokens.
        seed: makes sampling reproducible; None draws one when the request is submitted.
        n: how many samples to make of the prompt, each with a stream of random numbers of its own. The
            first is the one that n = 1 gives.
        logprobs: report the log-probability of each output token, and of this many most likely ones. They are the
            model's own: neither temperature nor anything above touches them.
        prompt_logprobs: the same for each token of the prompt but the first.
        speculative: None for the engine's setting, False for no drafts, a number for at most so many per step.
            Changes the speed alone.
        priority: requests with a smaller number are admitted first and preempted last; changes the order alone.
        cache_salt: the prefix cache is shared with requests of the same salt alone, and stores of earlier outputs with
            none, so that nobody can learn another's text from how fast he is served. Changes the speed alone.

    Raises:
        RequestError: for a value out of range, NaN, or an unknown name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1)] = 128
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    bad_words: tuple[str | tuple[TokenId, ...], ...] = ()
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    logits_processors: SkipJsonSchema[tuple[LogitsProcessor, ...]] = ()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    speculative: Annotated[int, Field(ge=1)] | Literal[False] | None = None
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            names = list(type(self).model_fields)
            raise RequestError(describe_validation_error(error, names, "sampling parameter")) from None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop", "stop_token_ids", "allowed_token_ids", "logits_processors", "bad_words", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.field_name != "allowed_token_ids":
            return ()
        if info.field_name == "bad_words" and isinstance(value, list | tuple):
            return tuple(map(_bad_word, value))
        return tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_from_json(cls, value: Any) -> Any:
        """JSON has no integer keys."""
        if not isinstance(value, dict):
            return value
        pairs = [(int(key) if isinstance(key, str) and key.isdecimal() else key, bias) for key, bias in value.items()]
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a token id is given twice")
        return dict(pairs)

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

    @model_validator(mode="after")
    def _fit_each_other(self) -> "SamplingParams":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n is {self.n} but temperature is 0: all samples would be the same; use n = 1")
        return self

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in type(self).model_fields)
        return hash(tuple(tuple(sorted(value.items())) if isinstance(value, dict) else value for value in values))

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
