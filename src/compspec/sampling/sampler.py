"""The sampler: every logits row becomes one token, as a function of that row and its request alone."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compspec.sampling import transforms
from compspec.sampling.metadata import SamplingMetadata

NoiseFunction = Callable[[Tensor, Tensor], Tensor]
"""seeds [N], positions [N] -> noise [N, V]."""

NOISE_ROWS = 8
"""Rows per call of the noise function: one static shape serves every bucket."""


class Sampler:
    """Penalties, temperature, filters, then the largest of logits plus Gumbel noise.

    The noise is keyed by (seed, position, token id), so the token at a position does not depend on the
    step, the row or the batch in which it is sampled. (Drafter-invariant speculation: Daliri, Musco, Suresh,
    arXiv 2408.07978.)

    Args:
        noise: makes Gumbel noise; called with `NOISE_ROWS` rows.
        tokenizer_vocab_size: ids at and above are padding of the embedding and never sampled.
    """

    def __init__(self, noise: NoiseFunction, tokenizer_vocab_size: int | None = None) -> None:
        self._noise = noise
        self._tokenizer_vocab_size = tokenizer_vocab_size

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Samples every row.

        Args:
            logits: [R, Q, V], any floating type; not changed.
            metadata: of the same step, padded to the same shape.

        Returns:
            target_token_ids, [R, Q] int64. Of equal values the lowest token id wins.
        """
        logits = logits.float()
        if self._tokenizer_vocab_size is not None and self._tokenizer_vocab_size < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self._tokenizer_vocab_size :] = float("-inf")
        if metadata.prompt_mask is not None and metadata.output_counts is not None:
            logits = transforms.apply_penalties(
                logits,
                prompt_mask=metadata.prompt_mask,
                output_counts=metadata.output_counts,
                draft_token_ids=metadata.draft_token_ids,
                repetition=metadata.repetition,
                presence=metadata.presence,
                frequency=metadata.frequency,
            )
        if not metadata.any_noise:
            return logits.argmax(-1)
        scaled = transforms.apply_temperature(logits, metadata.temperature)
        scaled = transforms.apply_top_k(scaled, metadata.top_k, metadata.max_top_k)
        if metadata.any_top_p:
            scaled = transforms.apply_top_p(scaled, metadata.top_p)
        if metadata.any_min_p:
            scaled = transforms.apply_min_p(scaled, metadata.log_min_p)
        noisy = scaled + self._noise_like(scaled, metadata)
        greedy = (metadata.temperature == 0)[:, None, None]
        return torch.where(greedy, logits, noisy).argmax(-1)

    def _noise_like(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Noise for the rows of requests that sample, 0 for greedy ones: [R, Q, V]."""
        rows = (metadata.temperature > 0)[:, None].expand(logits.shape[:2]).flatten().nonzero().flatten()
        seeds = metadata.seeds[:, None].expand(logits.shape[:2]).flatten()[rows]
        positions = metadata.positions.flatten()[rows]
        noise = torch.zeros_like(logits).flatten(0, 1)
        for first in range(0, len(rows), NOISE_ROWS):
            part = slice(first, first + NOISE_ROWS)
            missing = NOISE_ROWS - len(rows[part])
            drawn = self._noise(F.pad(seeds[part], (0, missing)), F.pad(positions[part], (0, missing)))
            noise[rows[part]] = drawn[: NOISE_ROWS - missing]
        return noise.view_as(logits)
