"""The static shapes that the model runs in."""

from compspec.batch import Bucket
from compspec.config import EngineConfig
from compspec.errors import ConfigError

DRAFT_ROWS = 2
"""Query rows per request of a model that drafts. Kernels for a single row can be slower than those for two."""


def _batch_sizes(config: EngineConfig) -> list[int]:
    largest = config.scheduler.max_num_seqs
    chosen = config.compile.decode_buckets
    if chosen is None:
        sizes = {4**power for power in range(16) if 4**power < largest}
    else:
        sizes = set(chosen)
        too_large = sorted(size for size in sizes if size > largest)
        if too_large:
            raise ConfigError(
                f"compile.decode_buckets has {too_large[0]} requests, more than scheduler.max_num_seqs = {largest}"
            )
    return sorted(sizes | {largest})


def _decode(shapes: set[tuple[int, int]]) -> list[Bucket]:
    return [Bucket(num_requests=size, query_len=width, num_logits=width) for size, width in sorted(shapes)]


def _prefill(config: EngineConfig) -> list[Bucket]:
    chunk = config.numerics.prefill_chunk
    tails = [chunk // 4, chunk] if chunk >= 64 else [chunk]
    return [Bucket(num_requests=1, query_len=length, num_logits=1) for length in tails]


class Buckets:
    """All shapes of one model, and which of them a step takes.

    Exact numerics decode at `decode_width`, and at `plain_width` where nothing is drafted and the self-test
    finds the two bit-equal; a prompt's chunks, the padding of the last one included, are a function of the
    prompt's length. Fast numerics decode at 1 and at K + 1 rows. With batch expansion each of
    these rows is a sequence of its own.
    """

    def __init__(self, decode: list[Bucket], prefill: list[Bucket]) -> None:
        self.decode = decode
        self.prefill = prefill

    @staticmethod
    def of_target(config: EngineConfig) -> "Buckets":
        """The shapes that an engine's target runs in.

        Raises:
            ConfigError: a bucket larger than `max_num_seqs`.
        """
        narrow = 1 if config.numerics.mode == "fast" else config.numerics.plain_width or config.query_len
        widths = sorted({narrow, config.query_len})
        shapes = {(size, width) for size in _batch_sizes(config) for width in widths}
        if config.speculative.scorer == "batch_expansion":
            shapes = {(size * width, 1) for size, width in shapes}
        return Buckets(_decode(shapes), _prefill(config))

    @staticmethod
    def of_draft(config: EngineConfig, *, has_prompts: bool) -> "Buckets":
        """The shapes of a model that drafts: one new token per request, or the two after a window that was kept whole.

        Args:
            has_prompts: whether it runs prompts itself, in the target's chunks.
        """
        shapes = {(size, DRAFT_ROWS) for size in _batch_sizes(config)}
        return Buckets(_decode(shapes), _prefill(config) if has_prompts else [])

    @property
    def all(self) -> list[Bucket]:
        """Every bucket, the largest first: a graph pool grows once."""
        return sorted(self.decode + self.prefill, key=lambda bucket: -bucket.num_tokens)

    @property
    def widest_decode(self) -> Bucket:
        """The bucket that holds any decode step."""
        return max(self.decode, key=lambda bucket: bucket.num_tokens)

    def select(self, num_requests: int, num_rows: int, *, is_prefill: bool) -> Bucket:
        """The smallest bucket that holds `num_requests` requests of up to `num_rows` rows."""
        among = self.prefill if is_prefill else self.decode
        fitting = [b for b in among if b.num_requests >= num_requests and b.query_len >= num_rows]
        assert fitting, f"no bucket holds {num_requests} requests of {num_rows} rows"
        return min(fitting, key=lambda bucket: bucket.num_tokens)

    def restrict_decode(self, keep: list[Bucket]) -> None:
        """Drops the decode buckets that are not in `keep`."""
        self.decode = [bucket for bucket in self.decode if bucket in keep]
