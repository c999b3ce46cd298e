"""Several proposers in order: for each request the first that proposes anything drafts.

`proposers: [suffix, ngram]`; an entry is a name, or a mapping of `method` and that proposer's own options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.config import EngineConfig, SpeculativeSection
from compspec.errors import ConfigError
from compspec.models.adapter import ModelAdapter
from compspec.models.loader import LoadedModel
from compspec.proposers.proposer import Options as BaseOptions
from compspec.proposers.proposer import Proposer, Target, make_proposer, names
from compspec.request import Request
from compspec.runner.model_runner import ModelRunner


class Options(BaseOptions):
    """Who is asked, in this order."""

    proposers: tuple[dict[str, Any], ...] = Field(
        description="names, or mappings of a method and its options; the first that proposes anything wins"
    )

    @field_validator("proposers", mode="before")
    @classmethod
    def _names_as_mappings(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError("must be a list of at least one proposer, such as [suffix, ngram]")
        return tuple(_as_mapping(entry) for entry in value)


def _as_mapping(entry: Any) -> dict[str, Any]:
    if isinstance(entry, str):
        entry = {"method": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("method"), str):
        raise ValueError(f"an entry is a name or a mapping with a 'method', not {entry!r}")
    method = entry["method"]
    # Nothing would follow `none`, and a chain in a chain is the same as its proposers in its place.
    possible = [name for name in names() if name not in ("none", "chain")]
    if method not in possible:
        raise ValueError(f"'{method}' cannot be part of a chain; there are: {', '.join(possible)}")
    shared = sorted(set(SpeculativeSection.model_fields).intersection(entry) - {"method"})
    if shared:
        raise ValueError(f"'{shared[0]}' holds for the whole chain; it stands beside 'proposers', not inside")
    return dict(entry)


class ChainProposer(Proposer):
    """Asks each proposer about the requests that have no drafts yet.

    Every proposer sees every step's outcome, whoever drafted.
    """

    def __init__(self, proposers: Sequence[Proposer], num_draft_tokens: int) -> None:
        self._proposers = tuple(proposers)
        self._num_draft_tokens = num_draft_tokens

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """Those of all."""
        return [runner for proposer in self._proposers for runner in proposer.runners]

    def load(self, loaded: LoadedModel, config: EngineConfig) -> Sequence[ModelAdapter]:
        """See `Proposer`."""
        return [adapter for proposer in self._proposers for adapter in proposer.load(loaded, config)]

    def start(self, target: Target) -> None:
        """See `Proposer`."""
        for proposer in self._proposers:
            proposer.start(target)

    def prefill(self, batch: Batch) -> None:
        """See `Proposer`."""
        for proposer in self._proposers:
            proposer.prefill(batch)

    def propose(self, batch: Batch) -> DraftTokens:
        """Drafts for every request of a decode step, each request's from one proposer.

        Returns:
            probs [R, K, V] where any proposer that drafted has them; the drafts of the others are certain.
        """
        token_ids = np.full((len(batch.scheduled), self._num_draft_tokens), -1, dtype=np.int64)
        counts = np.zeros(len(batch.scheduled), dtype=np.int64)
        sampled: dict[int, Tensor] = {}
        waiting = list(range(len(batch.scheduled)))
        reasons = [entry.request.stats.speculation_off_because for entry in batch.scheduled]
        for proposer in self._proposers:
            if not waiting:
                break
            asked = replace(batch, scheduled=tuple(batch.scheduled[row] for row in waiting))
            drafts = proposer.propose(asked)
            token_ids[waiting, : drafts.token_ids.shape[1]] = drafts.token_ids
            counts[waiting] = drafts.num_draft_tokens
            if drafts.probs is not None:
                sampled |= {row: probs for row, probs in zip(waiting, drafts.probs, strict=True) if counts[row]}
            waiting = [row for row in waiting if not counts[row]]
        for entry, count, reason in zip(batch.scheduled, counts, reasons, strict=True):
            if count:  # one of them cannot draft for it, but another does
                entry.request.stats.speculation_off_because = reason
        probs = _merge(sampled, token_ids) if sampled else None
        return DraftTokens(token_ids=token_ids, num_draft_tokens=counts, probs=probs)

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """See `Proposer`."""
        for proposer in self._proposers:
            proposer.observe(batch, output)

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        for proposer in self._proposers:
            proposer.forget(request)

    def reset(self) -> None:
        """See `Proposer`."""
        for proposer in self._proposers:
            proposer.reset()

    def num_computed_tokens(self, request: Request) -> int:
        """As far as every proposer goes."""
        return min(proposer.num_computed_tokens(request) for proposer in self._proposers)


def _merge(sampled: Mapping[int, Tensor], token_ids: NDArray[np.int64]) -> Tensor:
    """Probabilities of drafts [R, K], [R, K, V]: [k, V] of the rows that were sampled, one-hot for the others."""
    some = next(iter(sampled.values()))
    chosen = torch.from_numpy(token_ids).to(some.device)[..., None]
    probs = torch.zeros(*token_ids.shape, some.shape[-1], dtype=torch.float32, device=some.device)
    probs.scatter_(2, chosen.clamp(min=0), (chosen >= 0).float())
    for row, own in sampled.items():
        probs[row, : len(own)] = own
    return probs


def make(options: Options, num_draft_tokens: int) -> ChainProposer:
    """See `compspec.proposers.proposer.Proposer`.

    Raises:
        ConfigError: an option that a proposer of the chain does not take; the message names the proposer.
    """
    proposers = []
    for place, entry in enumerate(options.proposers):
        method = entry["method"]
        own = {name: value for name, value in entry.items() if name != "method"}
        try:
            proposers.append(make_proposer(method, own, num_draft_tokens))
        except ConfigError as error:
            raise ConfigError(f"speculative.proposers[{place}] ({method}): {error}") from None
    return ChainProposer(proposers, num_draft_tokens)
