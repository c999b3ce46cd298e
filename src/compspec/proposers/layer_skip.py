"""The target's own first layers and its head draft: no more weights, and those layers' keys and values are shared.

Source: Elhoushi et al., "LayerSkip", 2024 (arXiv 2404.16710); it pays with models that were trained to exit early.
"""

from collections.abc import Sequence

from pydantic import Field

from compspec.batch import Batch, DraftTokens
from compspec.config import EngineConfig
from compspec.errors import ConfigError
from compspec.models.adapter import ModelAdapter
from compspec.models.first_layers import first_layers
from compspec.models.loader import LoadedModel
from compspec.proposers.proposer import Options as BaseOptions
from compspec.proposers.proposer import Proposer, Target
from compspec.runner.drafter import draft_tokens
from compspec.runner.model_runner import ModelRunner


class Options(BaseOptions):
    """Where the draft leaves the model."""

    num_layers: int | None = Field(None, ge=1, description="layers that draft; default: a third of the model's")


class LayerSkipProposer(Proposer):
    """Keeps no state: what the target computed is what the draft reads.

    The draft writes the keys and values of the window that it drafts, in its layers; the target writes them anew before
    it reads them.
    """

    def __init__(self, options: Options, num_draft_tokens: int) -> None:
        self._options = options
        self._num_draft_tokens = num_draft_tokens

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """That of the first layers."""
        return [self._drafter.runner]

    def load(self, loaded: LoadedModel, config: EngineConfig) -> Sequence[ModelAdapter]:
        """Loads nothing.

        Raises:
            ConfigError: as many layers as the target has, or more.
            UnsupportedError: the target's layers cannot be told apart.
        """
        num_all = len(loaded.adapter.layers)
        num_layers = self._options.num_layers or max(1, num_all // 3)
        if num_layers >= num_all:
            raise ConfigError(f"speculative.num_layers is {num_layers}, it must be less than the model's {num_all}")
        self._adapter = first_layers(loaded.adapter, num_layers)
        return ()

    def start(self, target: Target) -> None:
        """Compiles and warms up."""
        num_layers, runner = len(self._adapter.layers), target.runner
        self._drafter = target.make_drafter(
            self._adapter,
            f"first {num_layers} layers",
            max_model_len=runner.adapter.max_model_len,
            has_prompts=False,
            caches=(runner.k_caches[:num_layers], runner.v_caches[:num_layers]),
        )

    def propose(self, batch: Batch) -> DraftTokens:
        """Drafts for all requests together."""
        rows = [row for row, entry in enumerate(batch.scheduled) if entry.max_draft_tokens > 0]
        entries = [batch.scheduled[row] for row in rows]
        starts = [entry.num_computed_tokens for entry in entries]
        drafted = self._drafter.draft(entries, starts, [entry.max_draft_tokens for entry in entries])
        return draft_tokens(drafted, rows, len(batch.scheduled), self._num_draft_tokens)


def make(options: Options, num_draft_tokens: int) -> LayerSkipProposer:
    """See `compspec.proposers.proposer.Proposer`."""
    return LayerSkipProposer(options, num_draft_tokens)
