"""Sampling metadata: for every scored row, the parameters of its request and the tokens it has seen.

Row j of a verification window samples as if the drafts before it were output: it has seen
`prompt + outputs + drafts[:j]`. The committed part is per-slot state, on the device from a request's first sampled
token to its last; the drafts come with the step. Rows that nothing is sampled from have no metadata.

Legend: R requests, K drafts, V vocabulary, S slots, M rows to sample, N distinct tokens of a request.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compspec.batch import Batch, DraftTokens, Scores, StepOutput
from compspec.request import Request
from compspec.sampling.params import LogitsProcessor
from compspec.transfer import upload

GROUP_ROWS = 8
"""On a GPU whatever rounds runs on groups of so many rows: one static shape, whatever is in the batch. On a CPU, where
rows that only fill a group cost as much as the others, it runs on one row at a time."""

WIDE_GROUP_ROWS = 64
"""On a GPU, rows whose sampling does not round (no top_p) run in groups of so many, where there are as many: fewer
kernels to launch. On a CPU `GROUP_ROWS` serves for that."""

_NO_ROWS = np.empty(0, dtype=np.int64)

NO_DRAFT = -2
"""Equal to no token, and not to the sampler's "no token" either."""


def group_sizes(device: torch.device) -> tuple[int, ...]:
    """The numbers of rows that noise is made for at once on this device. What rounds runs on the first alone."""
    return (GROUP_ROWS, WIDE_GROUP_ROWS) if device.type == "cuda" else (1, GROUP_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows that are sampled with noise, together.

    Attributes:
        rows: [G] int64, G one of `group_sizes`, places among the M rows; the last one repeated as padding.
        num_rows: how many are real.
        max_top_k: the largest top_k among them.
        any_top_p, any_min_p: whether any of them needs that filter. Skipping one changes no bit of a row that does
            not ask for it.
    """

    rows: Tensor
    num_rows: int
    max_top_k: int
    any_top_p: bool
    any_min_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What the penalties of P requests with L rows need.

    Attributes:
        rows: [L] int64, places among the M rows.
        request: [L] int64, which of the P requests each row belongs to.
        num_drafts_seen: [L] int64, how many drafts stand before each row.
        token_ids: [P, N] int64, the distinct tokens of prompt and output; the first one repeated as padding.
        in_prompt, counts: [P, N] whether each is in the prompt, and its occurrences in the output (int32).
        draft_token_ids: [P, K] int64, -1 where absent.
        draft_in_prompt, draft_counts: [P, K] the same for the drafts.
        repetition, presence, frequency: [P] float32.
    """

    rows: Tensor
    request: Tensor
    num_drafts_seen: Tensor
    token_ids: Tensor
    in_prompt: Tensor
    counts: Tensor
    draft_token_ids: Tensor
    draft_in_prompt: Tensor
    draft_counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProcessors:
    """A row's own logits processors and the tokens it has seen, prompt included."""

    row: int
    processors: tuple[LogitsProcessor, ...]
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Everything that sampling one step needs.

    Attributes:
        row_starts: R + 1 numbers; request r has the rows row_starts[r] .. row_starts[r + 1].
        logit_rows: M numbers, where each row stands in the step's logits; on the host.
        rows: [M] int64, the same on the device.
        request, depth: [M] int64, the request of each row, and how many drafts stand before it.
        next_draft: [M] int64, the draft that follows each row; `NO_DRAFT` after the last.
        positions: [M] int64, the absolute position of the token each row samples.
        window_starts: [M] int64, the position of the first row of its request.
        seeds: [M] int64; temperature, top_p, log_min_p: [M] float32; top_k: [M] int64.
        groups: the rows that are sampled with noise; the others are greedy.
        penalties: None where no request has one.
        bias_index, bias: [B] int64 places row * V + token in the M rows, [B] float32; None where there is none.
        banned: [F] int64 places row * V + token that are forbidden; None where there are none.
        allowed: first row, row after the last, and the token ids they are restricted to, per request that has some.
        processors: rows with processors of their own.
    """

    row_starts: tuple[int, ...]
    logit_rows: NDArray[np.int64]
    rows: Tensor
    request: Tensor
    depth: Tensor
    next_draft: Tensor
    positions: Tensor
    window_starts: Tensor
    seeds: Tensor
    temperature: Tensor
    top_p: Tensor
    log_min_p: Tensor
    top_k: Tensor
    groups: tuple[RowGroup, ...] = ()
    penalties: Penalties | None = None
    bias_index: Tensor | None = None
    bias: Tensor | None = None
    banned: Tensor | None = None
    allowed: tuple[tuple[int, int, Tensor], ...] = ()
    processors: tuple[RowProcessors, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Slot:
    """What a slot's request asks for, read once, and how many of its tokens are counted."""

    request: Request
    num_counted: int
    seen: NDArray[np.bool_] | None = None
    num_distinct: int = 0
    bias_tokens: NDArray[np.int64] | None = None
    bias_values: NDArray[np.float32] | None = None
    banned: NDArray[np.int64] | None = None
    bad_words: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    ends: NDArray[np.int64] | None = None
    allowed: Tensor | None = None

    @property
    def has_edits(self) -> bool:
        """Whether single places of its rows are forbidden or have a bias."""
        single = (self.bias_tokens, self.banned, self.ends)
        return bool(self.bad_words) or any(each is not None for each in single)


def next_drafts(drafts: DraftTokens, request: NDArray[np.int64], depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M], the draft that follows each row."""
    follows = np.full(len(request), NO_DRAFT, dtype=np.int64)
    some = np.flatnonzero(depth < drafts.num_draft_tokens[request])
    follows[some] = drafts.token_ids[request[some], depth[some]]
    return follows


def group_rows(
    temperature: NDArray[np.float32], top_p: NDArray[np.float32], sizes: tuple[int, ...]
) -> Iterable[tuple[list[int], int]]:
    """Rows with temperature in groups, and the size of each; those that need the dear top_p side by side."""
    noisy = np.flatnonzero(temperature > 0)
    plain = top_p[noisy] >= 1
    rows = [*noisy[plain].tolist(), *noisy[~plain].tolist()]
    num_plain = np.count_nonzero(plain)
    first = 0
    while first < len(rows):
        size = max((size for size in sizes if first + size <= num_plain), default=sizes[0])
        yield rows[first : first + size], size
        first += size


def padded(rows: list[int], size: int) -> list[int]:
    """The last row repeated up to `size`."""
    return rows + rows[-1:] * (size - len(rows))


def make_group(
    sent_rows: Tensor, rows: list[int], top_k: list[int], top_p: list[float], log_min_p: list[float]
) -> RowGroup:
    """The group of `rows`, which are `sent_rows` on the device; the others are of all M rows."""
    return RowGroup(
        rows=sent_rows,
        num_rows=len(rows),
        max_top_k=max(top_k[row] for row in rows),
        any_top_p=any(top_p[row] < 1 for row in rows),
        any_min_p=any(log_min_p[row] > -math.inf for row in rows),
    )


class MetadataState:
    """Per-slot state.

    Args:
        max_num_seqs: number of slots, S.
        vocab_size: V.
        max_model_len: prompt and output at the longest.
        eos_token_ids: the model's ends, which `min_tokens` forbids for a while.
        device: where the sampler runs.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._device = device
        self._group_sizes = group_sizes(device)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._prompt_mask = torch.zeros(max_num_seqs, vocab_size, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        # The distinct tokens of each slot, so that penalties touch those alone and not the whole vocabulary.
        capacity = min(vocab_size, max_model_len)
        self._distinct = torch.zeros(max_num_seqs, capacity, dtype=torch.int64, device=device)
        self._slots: list[_Slot | None] = [None] * max_num_seqs

    @staticmethod
    def state_bytes(max_num_seqs: int, vocab_size: int, max_model_len: int) -> int:
        """Bytes on the device."""
        return max_num_seqs * (vocab_size * 5 + min(vocab_size, max_model_len) * 8)

    def build(
        self, batch: Batch, drafts: DraftTokens, scores: Scores, *, newest_only: bool = False
    ) -> SamplingMetadata:
        """Makes the metadata of a step.

        Args:
            newest_only: each request has one row, after its last draft: the next one is being drafted, and
                `scores.first_row` is that row.
        """
        entries = batch.scheduled
        # A prompt's last chunk has one row that samples, after its last token; a decode row follows each token.
        first_depth = drafts.num_draft_tokens if newest_only else np.zeros_like(drafts.num_draft_tokens)
        counts = np.array([int(entry.samples) for entry in entries]) * (drafts.num_draft_tokens + 1 - first_depth)
        row_starts = np.concatenate(([0], np.cumsum(counts)))
        slots = [self._slot(entry.slot, entry.request) if entry.samples else None for entry in entries]
        request = np.repeat(np.arange(len(entries)), counts)
        row = np.arange(row_starts[-1]) - row_starts[request]
        depth = row + first_depth[request]
        params = [entry.request.params for entry in entries]
        first_row = np.array(scores.first_row, dtype=np.int64)
        window_start = np.array([entry.num_computed_tokens + entry.num_new_tokens for entry in entries], dtype=np.int64)

        def per_row(values: list[float], dtype: type) -> NDArray[Any]:
            return np.array(values, dtype=dtype)[request]

        temperature = per_row([each.temperature for each in params], np.float32)
        top_p = per_row([each.top_p for each in params], np.float32)
        log_min_p = per_row([each.log_min_p for each in params], np.float32)
        top_k = per_row([min(each.top_k, self._vocab_size) for each in params], np.int64)
        bans, bias_index, bias = self._edits(batch, drafts, slots, row_starts, first_depth)
        groups = list(group_rows(temperature, top_p, self._group_sizes))
        logit_rows = first_row[request] + row
        arrays = {
            "rows": logit_rows,
            "request": request,
            "depth": depth,
            "next_draft": next_drafts(drafts, request, depth),
            "positions": window_start[request] + depth,
            "window_starts": window_start[request],
            "seeds": per_row([entry.request.seed for entry in entries], np.int64),
            "temperature": temperature,
            "top_p": top_p,
            "log_min_p": log_min_p,
            "top_k": top_k,
            "bans": bans,
            "bias_index": bias_index,
            "bias": bias,
            "groups": np.array([row for rows, size in groups for row in padded(rows, size)], dtype=np.int64),
            **self._penalty_arrays(batch, drafts, slots, request),
        }
        sent = dict(zip(arrays, upload(list(arrays.values()), self._device), strict=True))
        filters = (top_k.tolist(), top_p.tolist(), log_min_p.tolist())
        sent_groups = torch.split(sent["groups"], [size for _, size in groups])
        return SamplingMetadata(
            row_starts=tuple(row_starts.tolist()),
            logit_rows=logit_rows,
            rows=sent["rows"],
            request=sent["request"],
            depth=sent["depth"],
            next_draft=sent["next_draft"],
            positions=sent["positions"],
            window_starts=sent["window_starts"],
            seeds=sent["seeds"],
            temperature=sent["temperature"],
            top_p=sent["top_p"],
            log_min_p=sent["log_min_p"],
            top_k=sent["top_k"],
            groups=tuple(
                make_group(sent_rows, rows, *filters) for sent_rows, (rows, _) in zip(sent_groups, groups, strict=True)
            ),
            penalties=self._penalties(sent, slots),
            bias_index=sent["bias_index"] if len(bias_index) else None,
            bias=sent["bias"] if len(bias) else None,
            banned=sent["bans"] if len(bans) else None,
            allowed=tuple(
                (int(row_starts[index]), int(row_starts[index + 1]), slot.allowed)
                for index, slot in enumerate(slots)
                if slot is not None and slot.allowed is not None
            ),
            processors=tuple(
                RowProcessors(
                    row=int(row_starts[index]) + row,
                    processors=entry.request.params.logits_processors,
                    token_ids=[
                        *entry.request.token_ids.tolist(),
                        *drafts.token_ids[index, : first_depth[index] + row].tolist(),
                    ],
                )
                for index, entry in enumerate(entries)
                if entry.request.params.logits_processors
                for row in range(counts[index])
            ),
        )

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """Counts the tokens that a step added to each output."""
        slots: list[int] = []
        token_ids: list[int] = []
        for entry, tokens in zip(batch.scheduled, output.token_ids, strict=True):
            slot = self._slots[entry.slot]
            if slot is None or slot.request is not entry.request:
                continue
            slot.num_counted += len(tokens)
            if tokens and slot.seen is not None:
                slots += [entry.slot] * len(tokens)
                token_ids += tokens
                self._add_distinct(entry.slot, slot, np.array(tokens))
        if slots:
            at = tuple(upload([np.array(slots), np.array(token_ids)], self._device))
            ones = torch.ones(len(slots), dtype=torch.int32, device=self._device)
            self._output_counts.index_put_(at, ones, accumulate=True)

    def _to(self, array: NDArray[Any]) -> Tensor:
        return upload([array], self._device)[0]

    def _slot(self, index: int, request: Request) -> _Slot:
        """The slot's state; loaded where the slot had another request, or this one went on in another slot."""
        slot = self._slots[index]
        if slot is None or slot.request is not request or slot.num_counted != request.num_tokens:
            slot = self._slots[index] = self._load(index, request)
        return slot

    def _load(self, index: int, request: Request) -> _Slot:
        params = request.params
        slot = _Slot(request=request, num_counted=request.num_tokens)
        if params.logit_bias:
            slot.bias_tokens = np.array(list(params.logit_bias), dtype=np.int64)
            slot.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        words = [word for word in params.bad_words if not isinstance(word, str)]
        single = [word[0] for word in words if len(word) == 1]
        slot.banned = np.array(single, dtype=np.int64) if single else None
        for word in words:
            if len(word) > 1:
                slot.bad_words.setdefault(word[-2], []).append(word)
        if params.min_tokens:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
            slot.ends = np.array(sorted(ends), dtype=np.int64) if ends else None
        if params.allowed_token_ids is not None:
            slot.allowed = self._to(np.array(sorted(set(params.allowed_token_ids)), dtype=np.int64))
        if params.has_penalties:
            self._load_counts(index, slot, request)
        return slot

    def _load_counts(self, index: int, slot: _Slot, request: Request) -> None:
        """Prompt mask, output counts and distinct tokens, from the request's tokens alone."""
        tokens = request.token_ids.astype(np.int64)
        prompt, output = upload(np.split(tokens, [request.num_prompt_tokens]), self._device)
        self._prompt_mask[index].fill_(False).index_fill_(0, prompt, True)
        ones = torch.ones(len(output), dtype=torch.int32, device=self._device)
        self._output_counts[index].zero_().index_add_(0, output, ones)
        self._distinct[index].fill_(int(tokens[0]))
        slot.seen = np.zeros(self._vocab_size, dtype=bool)
        self._add_distinct(index, slot, tokens)

    def _add_distinct(self, index: int, slot: _Slot, tokens: NDArray[np.int64]) -> None:
        assert slot.seen is not None
        new = np.unique(tokens[~slot.seen[tokens]])
        slot.seen[new] = True
        self._distinct[index, slot.num_distinct : slot.num_distinct + len(new)] = self._to(new)
        slot.num_distinct += len(new)

    def _edits(
        self,
        batch: Batch,
        drafts: DraftTokens,
        slots: list[_Slot | None],
        row_starts: NDArray[np.int64],
        first_depth: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Single places in the M rows: the forbidden ones, and those with a bias and its value."""
        bans, bias_index, bias = [_NO_ROWS], [_NO_ROWS], [np.empty(0, dtype=np.float32)]
        for index, (entry, slot) in enumerate(zip(batch.scheduled, slots, strict=True)):
            if slot is None or not slot.has_edits:
                continue
            rows = np.arange(row_starts[index], row_starts[index + 1], dtype=np.int64)
            if slot.banned is not None:
                bans.append((rows[:, None] * self._vocab_size + slot.banned).ravel())
            num_before = int(first_depth[index])
            if slot.ends is not None:
                num_output = entry.request.num_output_tokens + num_before
                early = rows[: max(0, entry.request.params.min_tokens - num_output)]
                bans.append((early[:, None] * self._vocab_size + slot.ends).ravel())
            if slot.bad_words:
                found = _completed(slot.bad_words, entry.request, drafts.token_ids[index], num_before, len(rows))
                bans.append(np.array([rows[row] * self._vocab_size + token for row, token in found], dtype=np.int64))
            if slot.bias_tokens is not None and slot.bias_values is not None:
                bias_index.append((rows[:, None] * self._vocab_size + slot.bias_tokens).ravel())
                bias.append(np.tile(slot.bias_values, len(rows)))
        return np.concatenate(bans), np.concatenate(bias_index), np.concatenate(bias)

    def _penalty_arrays(
        self, batch: Batch, drafts: DraftTokens, slots: list[_Slot | None], request: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """What `_penalties` needs from the host; empty where no request has penalties."""
        chosen = [index for index, slot in enumerate(slots) if slot is not None and slot.seen is not None]
        if not chosen:
            return {}
        number = np.full(len(slots), -1, dtype=np.int64)
        number[chosen] = np.arange(len(chosen))
        rows = np.flatnonzero(number[request] >= 0)
        params = [batch.scheduled[index].request.params for index in chosen]
        strengths = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in params]
        return {
            "penalty rows": rows,
            "penalty request": number[request[rows]],
            "penalty slots": np.array([batch.scheduled[index].slot for index in chosen]),
            "penalty drafts": drafts.token_ids[chosen],
            "penalty strengths": np.array(strengths, dtype=np.float32).T.copy(),
        }

    def _penalties(self, sent: dict[str, Tensor], slots: list[_Slot | None]) -> Penalties | None:
        if "penalty rows" not in sent:
            return None
        rows, at, draft_token_ids = sent["penalty rows"], sent["penalty slots"], sent["penalty drafts"]
        longest = max(slot.num_distinct for slot in slots if slot is not None)  # 0 where nothing is counted
        token_ids = self._distinct[at, :longest]
        # An absent draft stands in as token 0, with the values that are right for token 0.
        present = draft_token_ids.clamp(min=0)
        repetition, presence, frequency = sent["penalty strengths"]
        return Penalties(
            rows=rows,
            request=sent["penalty request"],
            num_drafts_seen=sent["depth"][rows],
            token_ids=token_ids,
            in_prompt=self._prompt_mask[at[:, None], token_ids],
            counts=self._output_counts[at[:, None], token_ids],
            draft_token_ids=draft_token_ids,
            draft_in_prompt=self._prompt_mask[at[:, None], present],
            draft_counts=self._output_counts[at[:, None], present],
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )


def _completed(
    bad_words: dict[int, list[tuple[int, ...]]],
    request: Request,
    drafts: NDArray[np.int64],
    num_before: int,
    num_rows: int,
) -> Iterable[tuple[int, int]]:
    """The tokens that would complete a bad word, as (row, token).

    Args:
        bad_words: words of at least two tokens, by their last token but one.
        num_before: drafts that stand before the first row.
    """
    longest = max(len(word) for words in bad_words.values() for word in words) - 1
    num_drafts = num_before + num_rows - 1
    seen = [*request.token_ids[-longest:].tolist(), *drafts[:num_drafts].tolist()]
    first_end = len(seen) - (num_rows - 1)
    for row in range(num_rows):
        end = first_end + row
        for word in bad_words.get(seen[end - 1], ()):
            before = word[:-1]
            if len(before) <= end and tuple(seen[end - len(before) : end]) == before:
                yield row, word[-1]
