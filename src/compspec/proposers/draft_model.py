"""A second, smaller model with the target's tokenizer drafts.

It keeps its keys and values in the target's blocks: the block tables are the same, the tensors are its own. So whatever
gives or takes blocks (prefix cache, preemption, abort) holds for both models at once.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from compspec.batch import Batch, DraftTokens, ScheduledRequest, StepOutput
from compspec.config import EngineConfig, ModelSection
from compspec.errors import ConfigError, UnsupportedError
from compspec.models.adapter import ModelAdapter
from compspec.models.loader import LoadedModel, load_model
from compspec.proposers.proposer import Options as BaseOptions
from compspec.proposers.proposer import Proposer, Target
from compspec.request import Request
from compspec.runner.buckets import DRAFT_ROWS
from compspec.runner.drafter import draft_tokens
from compspec.runner.inputs import Query
from compspec.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_PROBE_TEXT = "Two tokenizers agree: on words, on 3,141 numbers, on código and on \n\tspace."


class Options(BaseOptions):
    """Which model drafts."""

    model: str = Field(description="hub id, folder, .gguf file, or package:<import_name>/<file>")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(
        None, ge=1, description="requests longer than this are not drafted for; default: what the model was made for"
    )
    trust_remote_code: bool = False


class DraftModelProposer(Proposer):
    """Follows every prompt, and drafts one token per forward.

    Per request it knows how many tokens its keys and values are valid for. A window that was kept whole leaves it one
    token short, which the next window's first forward makes up for; what it missed while it was not asked it computes
    in prompt chunks.
    """

    def __init__(self, options: Options, num_draft_tokens: int) -> None:
        self._options = options
        self._num_draft_tokens = num_draft_tokens
        self._num_valid: dict[str, int] = {}
        self._num_written: dict[str, int] = {}  # of requests that were drafted for in this step, drafts included

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """The draft model's."""
        return [self._drafter.runner]

    def load(self, loaded: LoadedModel, config: EngineConfig) -> Sequence[ModelAdapter]:
        """Loads the draft model.

        Raises:
            ConfigError: its tokenizer is not the target's.
            CompspecError: as `load_model`.
        """
        options = self._options
        section = ModelSection(
            source=options.model,
            revision=options.revision,
            dtype=options.dtype,
            device=str(loaded.adapter.device),
            trust_remote_code=options.trust_remote_code,
            attention=config.model.attention,
            cpu_linear=config.model.cpu_linear,
        )
        draft = load_model(section, config.cache_path)
        check_vocabularies(loaded, draft, options.model)
        own, target = draft.adapter.max_model_len, loaded.adapter.max_model_len
        if options.max_model_len is not None and options.max_model_len > own:
            raise ConfigError(
                f"speculative.max_model_len is {options.max_model_len}, but the draft model was made for {own} tokens"
            )
        self.max_model_len = min(options.max_model_len or own, target)
        if self.max_model_len < target:
            logger.info("requests are drafted for up to %d of %d tokens", self.max_model_len, target)
        self._adapter = draft.adapter
        return [draft.adapter]

    def start(self, target: Target) -> None:
        """Takes its memory, compiles and warms up."""
        self._drafter = target.make_drafter(
            self._adapter, "draft model", max_model_len=self.max_model_len, has_prompts=True
        )

    def prefill(self, batch: Batch) -> None:
        """Runs the target's chunk, for every request: another one may find its blocks in the prefix cache."""
        for entry in batch.scheduled:
            self._run_prompt(entry.request, entry.num_computed_tokens, entry.num_computed_tokens + entry.num_new_tokens)

    def propose(self, batch: Batch) -> DraftTokens:
        """Drafts for all requests together."""
        counts = [self._room(entry) for entry in batch.scheduled]
        rows = [row for row, count in enumerate(counts) if count > 0]
        entries = [batch.scheduled[row] for row in rows]
        starts = [self._catch_up(entry.request) for entry in entries]
        drafted = self._drafter.draft(entries, starts, [counts[row] for row in rows])
        for entry, num_forwards in zip(entries, drafted.num_forwards, strict=True):
            request = entry.request
            self._num_written[request.request_id] = request.num_tokens - 1 + num_forwards
        return draft_tokens(drafted, rows, len(batch.scheduled), self._num_draft_tokens)

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Keys and values of drafts that were kept are valid; the last draft of a window has none."""
        for entry, num_accepted in zip(batch.scheduled, output.num_accepted_tokens, strict=True):
            request = entry.request
            written = self._num_written.pop(request.request_id, None)
            if written is not None:
                self._num_valid[request.request_id] = min(request.num_tokens + num_accepted, written)

    def forget(self, request: Request) -> None:
        """Drops what is known of a request."""
        self._num_valid.pop(request.request_id, None)
        self._num_written.pop(request.request_id, None)

    def num_computed_tokens(self, request: Request) -> int:
        """Beyond its context the model never reads, so there all is well."""
        num_valid = self._num_valid.get(request.request_id, 0)
        return request.num_computed_tokens if num_valid >= self.max_model_len else num_valid

    def _room(self, entry: ScheduledRequest) -> int:
        """How many drafts fit into the model's context."""
        request = entry.request
        # The last draft is never run.
        room = self.max_model_len - request.num_tokens + 1
        if room <= 0 and request.params.speculative is not False:
            request.stats.speculation_off_because = f"the draft model's context is {self.max_model_len} tokens"
        return min(entry.max_draft_tokens, max(0, room))

    def _catch_up(self, request: Request) -> int:
        """Computes what the model missed, until `DRAFT_ROWS` rows are enough; returns the position of the first."""
        # A request that lost its blocks may have found its whole prompt again.
        found = request.num_kept_blocks * self._drafter.runner.block_size
        # Of a step that was interrupted after `observe`, the request has not got the tokens.
        num_valid = min(self._num_valid.get(request.request_id, found), request.num_tokens - 1)
        if request.num_tokens - num_valid > DRAFT_ROWS:
            num_valid = self._run_prompt(request, num_valid, request.num_tokens - 1)
        return num_valid

    def _run_prompt(self, request: Request, start: int, end: int) -> int:
        """Computes tokens `start` to `end` as far as they are in the model's context; returns where it came to."""
        runner = self._drafter.runner
        longest = runner.buckets.prefill[-1].query_len
        end = min(end, self.max_model_len)
        for first in range(start, end, longest):
            tokens = request.token_ids[first : min(first + longest, end)].tolist()
            bucket = runner.buckets.select(1, len(tokens), is_prefill=True)
            runner.run(bucket, [Query(token_ids=tokens, start=first, block_ids=request.block_ids)])
        self._num_valid[request.request_id] = max(start, end)
        return self._num_valid[request.request_id]


def check_vocabularies(target: LoadedModel, draft: LoadedModel, source: str) -> None:
    """Refuses a draft model whose token ids mean something else than the target's.

    Raises:
        ConfigError: the tokenizers differ, or without tokenizers the numbers of ids.
    """
    sizes = target.adapter.vocab_size, draft.adapter.vocab_size
    if target.tokenizer is None or draft.tokenizer is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"draft model '{source}' has {sizes[1]} token ids, the target {sizes[0]}, and without both tokenizers "
                "nothing says that they mean the same; use a draft model with the target's tokenizer"
            )
        return
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        token, number = min(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"draft model '{source}' has another tokenizer than the target: {len(theirs)} tokens against {len(ours)}, "
            f"and they differ at id {number} ({token!r}); use a draft model with the target's tokenizer"
        )
    if _encode(target.tokenizer) != _encode(draft.tokenizer):
        raise ConfigError(
            f"draft model '{source}' has the target's tokens, but its tokenizer cuts texts differently; use a draft "
            "model with the target's tokenizer"
        )
    # The rest of each is padding of the embedding.
    if max(ours.values()) >= min(sizes):
        raise UnsupportedError(
            f"the tokenizer has ids up to {max(ours.values())}, but the models' vocabularies have {sizes[0]} (target) "
            f"and {sizes[1]} (draft model '{source}')"
        )


def _encode(tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(_PROBE_TEXT, add_special_tokens=False)["input_ids"]
    return ids


def make(options: Options, num_draft_tokens: int) -> DraftModelProposer:
    """See `compspec.proposers.proposer.Proposer`."""
    return DraftModelProposer(options, num_draft_tokens)
