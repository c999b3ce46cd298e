"""FlashInfer's kernels, compiled ahead of time."""

from compspec.attention.backend import AttentionSetup


def use(setup: AttentionSetup) -> None:
    """Makes FlashInfer load kernels from the cache folder, where all that are needed are there."""
