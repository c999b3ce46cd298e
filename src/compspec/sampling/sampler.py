"""The sampler: every row of logits becomes one token, as a function of that row and its request alone."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compspec.batch import Scores
from compspec.errors import one_line
from compspec.sampling import transforms
from compspec.sampling.metadata import RowGroup, RowProcessors, SamplingMetadata
from compspec.sampling.noise import TARGET_STREAM, stream_salts

logger = logging.getLogger(__name__)

NoiseFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""seeds [N], positions [N], salts [N] -> noise [N, V]; see `noise.GumbelNoise`."""

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What sampling made of a step. M rows, as in the step's metadata.

    Attributes:
        token_ids: [M] int64; `NO_TOKEN` where every token is forbidden, the logits are NaN, or a processor failed.
        logits: [M, V] float32 as the tokens were chosen from them, before noise: of rows with temperature, the
            softmax is the distribution that was sampled.
        failures: what a row's own logits processor raised. A failure counts only if the row is reached.
    """

    token_ids: Tensor
    logits: Tensor
    failures: dict[int, str]


class Sampler:
    """Bias, penalties, processors and bans, temperature, filters, then the largest of logits plus Gumbel noise.

    The noise is keyed by (seed, position, token id), so the token at a position does not depend on the
    step, the row or the batch in which it is sampled. (Drafter-invariant speculation: Daliri, Musco, Suresh,
    arXiv 2408.07978.) What rounds runs on groups of one size (`metadata.group_sizes`), the rest is elementwise, so
    neither do bits.

    Args:
        noise: makes Gumbel noise; called with as many rows as `metadata.group_sizes` says.
        tokenizer_vocab_size: ids at and above are padding of the embedding and never sampled.
    """

    def __init__(self, noise: NoiseFunction, tokenizer_vocab_size: int | None = None) -> None:
        self._noise = noise
        self._tokenizer_vocab_size = tokenizer_vocab_size

    @torch.no_grad()
    def sample(self, scores: Scores, metadata: SamplingMetadata, stream: int = TARGET_STREAM) -> Sampled:
        """Samples every row that has metadata. Of equal values the lowest token id wins.

        Args:
            scores: of the same step; not changed.
            stream: whose noise is drawn; see `noise`.
        """
        logits = scores.logits.index_select(0, metadata.rows)
        logits = logits.float()  # a copy in any case: the transforms work in place
        failures = self._edit_(logits, metadata)
        best, token_ids = logits.max(-1)
        for group in metadata.groups:
            real = group.rows[: group.num_rows]
            filtered = _filtered(logits[group.rows], group, metadata)
            salts = torch.zeros_like(group.rows)
            if stream != TARGET_STREAM:
                salts = stream_salts(stream, metadata.window_starts[group.rows])
            noise = self._noise(metadata.seeds[group.rows], metadata.positions[group.rows], salts)
            values, found = (filtered + noise).max(-1)
            token_ids[real] = found[: group.num_rows]
            logits[real] = filtered[: group.num_rows]
            best[real] = values[: group.num_rows]  # noise is finite, so -inf and NaN are still told from the rest
        # NaN is not above -inf either: a model that breaks down fails the request instead of choosing token 0.
        token_ids = torch.where(best > float("-inf"), token_ids, NO_TOKEN)
        return Sampled(token_ids=token_ids, logits=logits, failures=failures)

    def _edit_(self, logits: Tensor, metadata: SamplingMetadata) -> dict[int, str]:
        """Everything before the temperature. What is forbidden comes last and stays forbidden."""
        if metadata.bias_index is not None and metadata.bias is not None:
            transforms.add_bias_(logits, metadata.bias_index, metadata.bias)
        if metadata.penalties is not None:
            transforms.apply_penalties_(logits, metadata.penalties)
        failures = {}
        for one in metadata.processors:
            failure = _process_(logits[one.row], one)
            if failure is not None:
                failures[one.row] = failure
                logits[one.row] = float("-inf")
        if metadata.banned is not None:
            transforms.ban_(logits, metadata.banned)
        for first, end, token_ids in metadata.allowed:
            transforms.allow_(logits[first:end], token_ids)
        if self._tokenizer_vocab_size is not None:
            logits[:, self._tokenizer_vocab_size :] = float("-inf")
        return failures


def _filtered(logits: Tensor, group: RowGroup, metadata: SamplingMetadata) -> Tensor:
    """Temperature and filters of one group, [G, V]."""
    scaled = logits / metadata.temperature[group.rows, None]
    scaled = transforms.apply_top_k(scaled, metadata.top_k[group.rows], group.max_top_k)
    if group.any_top_p:
        scaled = transforms.apply_top_p(scaled, metadata.top_p[group.rows])
    if group.any_min_p:
        scaled = transforms.apply_min_p(scaled, metadata.log_min_p[group.rows])
    return scaled


def _process_(row: Tensor, one: RowProcessors) -> str | None:
    """Runs a row's own processors on its logits [V], in place; returns what went wrong, in one line."""
    result = row.clone()
    for processor in one.processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            result = processor(list(one.token_ids), result)
            problem = _not_a_row(result, row)
        except Exception as error:  # a user's code can raise anything
            logger.debug("logits processor %s failed", name, exc_info=True)
            problem = f"raised {type(error).__name__}: {one_line(error)}"
        if problem is not None:
            return f"logits processor '{name}' {problem}"
    row.copy_(result)
    return None


def _not_a_row(result: object, row: Tensor) -> str | None:
    """Why a processor's result cannot stand in for a row, or None if it can."""
    wanted = (row.dtype, row.shape, row.device, row.layout)
    if isinstance(result, Tensor) and (result.dtype, result.shape, result.device, result.layout) == wanted:
        return None
    given = type(result).__name__
    if isinstance(result, Tensor):
        given = f"{result.dtype} {list(result.shape)} {result.layout} on {result.device}"
    return f"must return a tensor {row.dtype} {list(row.shape)} on {row.device}, it returned {given}"
