"""The ratio test: keeps the target's distribution, not its tokens. An alternative to accept-iff-equal.

Sources: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", 2023
(arXiv 2211.17192); block verification: Sun et al., 2024 (arXiv 2403.10444).

A draft x that was sampled from q is kept with probability min(1, p(x) / q(x)); in place of the first that is not, a
token is drawn from the normalised excess max(p - q, 0). Acceptance and recovery have noise of their own, independent of
that of the drafts. Sharing it would be right for accept-iff-equal and wrong here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.sampling.metadata import SamplingMetadata, group_sizes
from compspec.sampling.noise import ACCEPTANCE_STREAM, RECOVERY_STREAM, stream_salts, uniform
from compspec.sampling.sampler import NO_TOKEN, NoiseFunction, Sampled
from compspec.sampling.verifier import step_output


class RejectionVerifier:
    """Keeps each draft with the probability that makes the output distributed as the target's.

    Greedy requests, and rows after the last draft, take the target's own token. Drafts without probabilities
    are certain: q is 1 at the draft.

    Args:
        noise: makes Gumbel noise; called with as many rows as the first of `metadata.group_sizes`.
        block: verify the window as a whole (arXiv 2403.10444), which keeps at least as many drafts.
    """

    def __init__(self, noise: NoiseFunction, *, block: bool = False) -> None:
        self._noise = noise
        self._num_kept = _num_kept_block if block else _num_kept_one_by_one

    def verify(self, sampled: Sampled, metadata: SamplingMetadata, batch: Batch, drafts: DraftTokens) -> StepOutput:
        """See `Verifier.verify`."""
        targets = sampled.token_ids.tolist()
        salts = stream_salts(ACCEPTANCE_STREAM, metadata.window_starts)
        draws = uniform(metadata.seeds, metadata.positions, salts)
        windows: list[list[int]] = []
        # Rows whose last token is still to be drawn, and from what.
        open_rows: list[tuple[int, int, Tensor]] = []
        for index, entry in enumerate(batch.scheduled):
            first, end = metadata.row_starts[index], metadata.row_starts[index + 1]
            target, draft = targets[first:end], drafts.token_ids[index, : max(0, end - first - 1)].tolist()
            # What follows a row that has no token is not part of the window.
            usable = target.index(NO_TOKEN) if NO_TOKEN in target else len(draft)
            draft = draft[:usable]
            if entry.request.params.is_greedy or not draft:
                kept = next((at for at, token in enumerate(draft) if token != target[at]), len(draft))
                windows.append([*draft[:kept], target[kept]] if target else [])
                continue
            p = _target_probs(sampled, first, target[: len(draft)])
            q = _draft_probs(drafts, index, draft, p)
            kept, excess = self._num_kept(p, q, draft, draws[first : first + len(draft)])
            if kept == len(draft):
                windows.append([*draft, target[kept]])
                continue
            windows.append(draft[:kept])
            # Rounding alone can leave no excess; then p and q are one distribution.
            open_rows.append((index, first + kept, excess if bool(excess.sum() > 0) else p[kept]))
        for (index, _, _), token in zip(open_rows, self._draw(open_rows, metadata), strict=True):
            windows[index].append(token)
        return step_output(windows, sampled, metadata, drafts)

    def _draw(self, open_rows: list[tuple[int, int, Tensor]], metadata: SamplingMetadata) -> list[int]:
        """Samples one token from each row's distribution, which need not be normalised."""
        found: list[int] = []
        size = group_sizes(metadata.rows.device)[0]
        for start in range(0, len(open_rows), size):
            part = open_rows[start : start + size]
            rows = torch.tensor([row for _, row, _ in part], device=metadata.rows.device)
            padded = F.pad(rows, (0, size - len(part)))
            salts = stream_salts(RECOVERY_STREAM, metadata.window_starts[padded])
            noise = self._noise(metadata.seeds[padded], metadata.positions[padded], salts)[: len(part)]
            weights = torch.stack([weight for _, _, weight in part])
            found += (weights.log() + noise).argmax(-1).tolist()
        return found


def _target_probs(sampled: Sampled, first: int, target: list[int]) -> Tensor:
    """p of the rows from `first` on, [len(target), V] float64."""
    p = sampled.logits[first : first + len(target)].double().softmax(-1)
    # A logit of +inf has no softmax; the sampler takes its token, so that one is certain.
    certain = torch.zeros_like(p).scatter_(1, torch.tensor(target, device=p.device)[:, None], 1.0)
    return torch.where(p.isnan().any(-1, keepdim=True), certain, p)


def _draft_probs(drafts: DraftTokens, index: int, draft: list[int], p: Tensor) -> Tensor:
    """q of a request's drafts, [len(draft), V] float64."""
    if drafts.probs is not None:
        return drafts.probs[index, : len(draft)].to(p.device, torch.float64)
    q = torch.zeros_like(p)
    q[torch.arange(len(draft)), torch.tensor(draft)] = 1.0
    return q


def _num_kept_one_by_one(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    """How many leading drafts pass, and the excess at the first that does not.

    Args:
        p, q: [n, V] float64, the target's and the proposer's distribution at each draft.
        draft: n tokens.
        draws: [n] float64 in (0, 1).
    """
    at = torch.tensor(draft, device=p.device)[:, None]
    passed = (draws * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0]).tolist()
    kept = passed.index(False) if False in passed else len(draft)
    place = min(kept, len(draft) - 1)
    return kept, (p[place] - q[place]).clamp(min=0)


def _num_kept_block(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    """Arguments and results as of `_num_kept_one_by_one`; the longest prefix that passes is kept."""
    at = torch.tensor(draft, device=p.device)[:, None]
    of_target = p.gather(1, at)
    # What the target forbids has ratio 0, even if the proposer says that it could not have drawn it.
    ratios = torch.where(of_target > 0, of_target / q.gather(1, at), 0.0)[:, 0].tolist()
    # weights[i]: how much of the target's probability the first i drafts carry, at most 1.
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(weights[-1] * ratio, 1.0) if weights[-1] > 0 else 0.0)
    carried = torch.tensor(weights, dtype=p.dtype, device=p.device)
    excess = (carried[:-1, None] * p - q).clamp(min=0)
    mass = excess.sum(-1).tolist()
    kept = 0
    for prefix, draw in enumerate(draws.tolist(), start=1):
        if prefix == len(draft):
            chance = weights[prefix]
        else:
            rest = mass[prefix] + 1.0 - weights[prefix]
            chance = mass[prefix] / rest if rest > 0 else 1.0
        if draw <= chance:
            kept = prefix
    return kept, excess[min(kept, len(draft) - 1)]
