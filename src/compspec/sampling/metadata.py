"""Sampling metadata: what each slot's parameters are, which tokens its prompt has and its output counts.

One row of state per request slot lives on the device from the request's first sampled token to its last.
Row j of a verification window is penalised for `outputs + drafts[:j]`: the committed part is here, the
drafts come with the step (transforms.apply_penalties).

Legend: R requests, Q query rows, K drafts, V vocabulary, S slots.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Everything that sampling one step needs; padded to the step's bucket.

    Attributes:
        positions: [R, Q] int64, the absolute position of the token each row samples.
        draft_token_ids: [R, K] int64, -1 where absent.
        seeds: [R] int64.
        temperature, top_p, log_min_p, repetition, presence, frequency: [R] float32.
        top_k: [R] int64.
        prompt_mask: [R, V] bool; output_counts: [R, V] int32; None where no request has a penalty.
        max_top_k: the largest of top_k.
        any_noise, any_top_p, any_min_p: whether any request needs that transform. Skipping one changes no
            bit of a request that does not ask for it.
    """

    positions: Tensor
    draft_token_ids: Tensor
    seeds: Tensor
    temperature: Tensor
    top_p: Tensor
    log_min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    prompt_mask: Tensor | None
    output_counts: Tensor | None
    max_top_k: int
    any_noise: bool
    any_top_p: bool
    any_min_p: bool


_FLOATS = ("temperature", "top_p", "log_min_p", "repetition", "presence", "frequency")


class MetadataState:
    """Per-slot state on the device.

    Args:
        max_num_seqs: number of slots; one more stands in for padding.
        vocab_size: V.
        device: where the sampler runs.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._padding_slot = max_num_seqs
        slots = max_num_seqs + 1
        self._prompt_mask = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        # Parameters are scalars: they live on the host and travel with each step.
        self._floats = {name: np.zeros(slots, dtype=np.float32) for name in _FLOATS}
        self._floats["top_p"][:] = 1.0
        self._floats["repetition"][:] = 1.0
        self._floats["log_min_p"][:] = -np.inf
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._seeds = np.zeros(slots, dtype=np.int64)
        self._penalised = np.zeros(slots, dtype=bool)
        self._owner: list[Request | None] = [None] * slots

    @staticmethod
    def state_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Bytes on the device."""
        return (max_num_seqs + 1) * vocab_size * 5

    def build(self, batch: Batch, drafts: DraftTokens, num_requests: int, num_rows: int) -> SamplingMetadata:
        """Makes the metadata of a step, padded to `num_requests` requests of `num_rows` scored rows."""
        slots = np.full(num_requests, self._padding_slot, dtype=np.int64)
        first_position = np.zeros(num_requests, dtype=np.int64)
        draft_token_ids = np.full((num_requests, drafts.token_ids.shape[1]), -1, dtype=np.int64)
        draft_token_ids[: len(batch.scheduled)] = drafts.token_ids
        for row, entry in enumerate(batch.scheduled):
            if self._owner[entry.slot] is not entry.request:
                self._load(entry.slot, entry.request)
            slots[row] = entry.slot
            # Row j of a request follows its j-th token of this step and samples the one after it.
            scored_from = entry.num_new_tokens - 1 if batch.is_prefill else 0
            first_position[row] = entry.num_computed_tokens + scored_from + 1
        floats = {name: torch.from_numpy(values[slots]).to(self._device) for name, values in self._floats.items()}
        penalised = bool(self._penalised[slots].any())
        at = torch.from_numpy(slots).to(self._device)
        return SamplingMetadata(
            positions=torch.from_numpy(first_position[:, None] + np.arange(num_rows)).to(self._device),
            draft_token_ids=torch.from_numpy(draft_token_ids).to(self._device),
            seeds=torch.from_numpy(self._seeds[slots]).to(self._device),
            top_k=torch.from_numpy(self._top_k[slots]).to(self._device),
            prompt_mask=self._prompt_mask[at] if penalised else None,
            output_counts=self._output_counts[at] if penalised else None,
            max_top_k=int(self._top_k[slots].max()),
            any_noise=bool((self._floats["temperature"][slots] > 0).any()),
            any_top_p=bool((self._floats["top_p"][slots] < 1).any()),
            any_min_p=bool((self._floats["log_min_p"][slots] > -np.inf).any()),
            **floats,
        )

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """Counts the tokens that a step added to each output."""
        slots: list[int] = []
        token_ids: list[int] = []
        for entry, tokens in zip(batch.scheduled, output.token_ids, strict=True):
            if self._penalised[entry.slot]:
                slots += [entry.slot] * len(tokens)
                token_ids += tokens
        if slots:
            at = (torch.tensor(slots, device=self._device), torch.tensor(token_ids, device=self._device))
            ones = torch.ones(len(slots), dtype=torch.int32, device=self._device)
            self._output_counts.index_put_(at, ones, accumulate=True)

    def _load(self, slot: int, request: Request) -> None:
        """Fills a slot for its new request; whatever the last one left is gone."""
        params = request.params
        self._owner[slot] = request
        self._penalised[slot] = params.has_penalties
        self._seeds[slot] = request.seed
        self._top_k[slot] = min(params.top_k, self._vocab_size)
        values = (
            params.temperature,
            params.top_p,
            params.log_min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        for name, value in zip(_FLOATS, values, strict=True):
            self._floats[name][slot] = value
        if not params.has_penalties:
            return
        tokens = torch.from_numpy(request.token_ids.astype(np.int64)).to(self._device)
        prompt, output = tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]
        self._prompt_mask[slot] = False
        self._prompt_mask[slot, prompt] = True
        self._output_counts[slot] = torch.bincount(output, minlength=self._vocab_size).to(torch.int32)
