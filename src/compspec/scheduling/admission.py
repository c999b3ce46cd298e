"""What is refused before it is queued: a prompt or parameters that this engine cannot run."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compspec.errors import RequestError, UnsupportedError
from compspec.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests have to fit.

    Attributes:
        max_model_len: tokens of prompt and output together.
        vocab_size: the model's rows.
        num_token_ids: ids at and above are padding of the vocabulary and never sampled.
        eos_token_ids: the model's end tokens.
    """

    max_model_len: int
    vocab_size: int
    num_token_ids: int
    eos_token_ids: frozenset[int]


def check_request(prompt_token_ids: Sequence[int], params: SamplingParams, limits: Limits) -> list[int]:
    """Refuses a request that could not run.

    Returns:
        The prompt as a list of plain integers.

    Raises:
        RequestError: an empty or too long prompt, ids outside the vocabulary, values that do not fit the model, or
            parameters that leave no token to sample.
        UnsupportedError: bad words that are text.
    """
    try:
        prompt = [operator.index(token) for token in prompt_token_ids]
    except TypeError:
        raise RequestError("a prompt of token ids must hold integers alone") from None
    if not prompt:
        raise RequestError("the prompt is empty; it must have at least one token")
    room = limits.max_model_len - len(prompt)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; with room for one more the model takes {limits.max_model_len}"
        )
    words = [word for word in params.bad_words if not isinstance(word, str)]
    if len(words) < len(params.bad_words):
        raise UnsupportedError("bad words that are text need a tokenizer, the engine knows token ids alone; use LLM")
    given: list[tuple[str, Iterable[int]]] = [
        ("token id", prompt),
        ("stop token id", params.stop_token_ids),
        ("logit_bias token id", params.logit_bias or ()),
        ("bad_words token id", itertools.chain.from_iterable(words)),
        ("allowed_token_ids token id", params.allowed_token_ids or ()),
    ]
    for what, tokens in given:
        bad = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
        if bad is not None:
            raise RequestError(f"{what} {bad} is outside the vocabulary of {limits.vocab_size}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > limits.vocab_size:
            raise RequestError(f"{name} is {count}, the vocabulary has {limits.vocab_size} tokens")
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but after the prompt the model has room for {room} tokens"
        )
    if params.allowed_token_ids is not None or words or params.min_tokens:
        _check_some_token_is_left(params, {word[0] for word in words if len(word) == 1}, limits)
    return prompt


def _check_some_token_is_left(params: SamplingParams, banned: set[int], limits: Limits) -> None:
    if not _is_any_left(params, banned, limits):
        raise RequestError("allowed_token_ids and bad_words leave no token that could be sampled")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids)}
    if params.min_tokens and not _is_any_left(params, banned | ends, limits):
        raise RequestError("min_tokens forbids all tokens that could be sampled: each of them ends the output")


def _is_any_left(params: SamplingParams, banned: set[int], limits: Limits) -> bool:
    if params.allowed_token_ids is not None:
        return any(token < limits.num_token_ids and token not in banned for token in params.allowed_token_ids)
    return sum(0 <= token < limits.num_token_ids for token in banned) < limits.num_token_ids
