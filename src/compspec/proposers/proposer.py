"""What a proposer is, and how one is found by its name."""

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

import compspec.proposers
from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.config import EngineConfig, SpeculativeSection
from compspec.errors import ConfigError
from compspec.models.adapter import ModelAdapter
from compspec.models.loader import LoadedModel
from compspec.request import Request
from compspec.runner.buckets import Buckets
from compspec.runner.drafter import Drafter
from compspec.runner.model_runner import ModelRunner, Progress
from compspec.sampling.metadata import MetadataState
from compspec.sampling.params import describe_validation_error
from compspec.sampling.sampler import Sampler


class Options(BaseModel):
    """Base of a proposer's own options, which stand in the `speculative` section. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a proposer may use of the engine that it drafts for.

    Attributes:
        config: the engine's configuration.
        runner: of the target model; the block tables of requests are the same for every model.
        metadata: per-slot sampling state, which draft rows read as the target's rows do.
        sampler: the target's, noise included.
        stream: the noise stream that sampled drafts take: the target's own where drafts are accepted iff equal, one
            independent of it under the ratio test.
        progress: told of each step of the start-up.
    """

    config: EngineConfig
    runner: ModelRunner
    metadata: MetadataState
    sampler: Sampler
    stream: int
    progress: Progress | None = None

    def make_drafter(
        self,
        adapter: ModelAdapter,
        label: str,
        *,
        max_model_len: int,
        has_prompts: bool,
        caches: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> Drafter:
        """Takes memory for a model that drafts in the target's blocks, compiles and warms it up.

        Args:
            adapter: the model.
            label: what the start-up calls it.
            max_model_len: it drafts within so many tokens.
            has_prompts: whether it runs prompts itself.
            caches: the key caches and value caches of its layers, where they exist already.

        Raises:
            CompspecError: as `ModelRunner` and its `warm_up`.
        """
        numerics = self.config.numerics.model_copy(update={"mode": "fast"})  # a draft may be anything
        runner = ModelRunner(
            adapter,
            self.config.model_copy(update={"numerics": numerics}),
            max_model_len,
            buckets=Buckets.of_draft(self.config, has_prompts=has_prompts),
            num_blocks=self.runner.num_blocks,
            caches=caches,
        )
        progress = self.progress
        runner.warm_up(progress and (lambda what, seconds: progress(f"{label}: {what}", seconds)))
        return Drafter(runner, self.runner.adapter.vocab_size, self.metadata, self.sampler, self.stream)


class Proposer(Protocol):
    """Guesses tokens. A guess can only change speed: what is wrong is rejected by the verifier.

    A module `compspec/proposers/<name>.py` holds a class `Options` and a function
    `make(options, num_draft_tokens) -> Proposer`. Most proposers need `propose` alone.

    The order of calls: `load`, `start`; then per step `prefill` or `propose`, and `observe`; `forget` at any time
    between steps.
    """

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """The models that it runs beside the target, once it has started."""
        return ()

    def load(self, loaded: LoadedModel, config: EngineConfig) -> Sequence[ModelAdapter]:
        """Loads what it needs, before the memory is planned.

        Args:
            loaded: the target.

        Returns:
            The models that need keys and values of their own in every block.

        Raises:
            CompspecError: it cannot draft for this target; the message says why.
        """
        return ()

    def start(self, target: Target) -> None:
        """Takes its memory, compiles and warms up. No request is running."""
        return

    def prefill(self, batch: Batch) -> None:
        """Follows a prompt's chunk, before the target runs it. Its blocks may enter the prefix cache afterwards."""
        return

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTokens:
        """Drafts for a decode step.

        Returns:
            token_ids [R, K] with at most `max_draft_tokens` of each scheduled request, -1 after them.
        """

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Learns what a step gave each request, prompt chunks included; tokens may go beyond an output's end.

        The requests themselves have not changed yet.
        """
        return

    def forget(self, request: Request) -> None:
        """Drops the state of a request that has ended (it has a finish reason) or has lost its blocks."""
        return

    def reset(self) -> None:
        """Drops what it has learned from requests that have ended, so that it drafts as after the start."""
        return

    def num_computed_tokens(self, request: Request) -> int:
        """How many of a request's tokens, from the first, its blocks are complete for, as far as this proposer goes.

        Asked for requests that have blocks. The default is for proposers that keep nothing in blocks.
        """
        return request.num_computed_tokens


def names() -> list[str]:
    """The proposers that exist: the files of this folder."""
    found = (module.name for module in pkgutil.iter_modules(compspec.proposers.__path__))
    return sorted(name for name in found if name != "proposer")


def make_proposer(method: str, options: Mapping[str, Any], num_draft_tokens: int) -> Proposer:
    """Finds `compspec/proposers/<method>.py` and makes its proposer.

    Raises:
        ConfigError: no such proposer (the message lists what there is), or options it does not take.
    """
    if method not in names():
        raise ConfigError(f"unknown speculative.method '{method}'; there are: {', '.join(names())}")
    module = importlib.import_module(f"compspec.proposers.{method}")
    try:
        parsed = module.Options.model_validate(dict(options))
    except ValidationError as error:
        shared = list(SpeculativeSection.model_fields)
        what = f"key for method {method} in configuration section 'speculative':"
        raise ConfigError(describe_validation_error(error, shared + list(module.Options.model_fields), what)) from None
    proposer: Proposer = module.make(parsed, num_draft_tokens)
    return proposer


def check_drafts(batch: Batch, drafts: DraftTokens, vocab_size: int) -> None:
    """Refuses drafts that break the protocol, before they could reach an embedding.

    Raises:
        ValueError: wrong shape, more drafts than allowed, or ids outside the vocabulary.
    """
    num_requests = len(batch.scheduled)
    counts = drafts.num_draft_tokens
    if drafts.token_ids.shape[0] != num_requests or counts.shape != (num_requests,):
        raise ValueError(f"proposer returned drafts for {counts.shape[0]} requests, the batch has {num_requests}")
    for row, entry in enumerate(batch.scheduled):
        count = int(counts[row])
        if not 0 <= count <= entry.max_draft_tokens:
            raise ValueError(f"proposer returned {count} drafts where at most {entry.max_draft_tokens} are allowed")
        if count > drafts.token_ids.shape[1]:
            raise ValueError(f"proposer counted {count} drafts in {drafts.token_ids.shape[1]} columns")
        real = drafts.token_ids[row, :count]
        if count and (real.min() < 0 or real.max() >= vocab_size):
            raise ValueError(f"proposer returned token ids {real.tolist()} outside the vocabulary of {vocab_size}")
        if (drafts.token_ids[row, count:] != -1).any():
            raise ValueError("proposer must pad drafts with -1")
    if drafts.probs is not None and drafts.probs.shape != (*drafts.token_ids.shape, vocab_size):
        raise ValueError(
            f"proposer returned probabilities {list(drafts.probs.shape)} for drafts {list(drafts.token_ids.shape)}"
        )
