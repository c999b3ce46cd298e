"""Blocks of the KV cache, counted by reference."""

from collections import deque

from compspec.batch import SCRATCH_BLOCK


class BlockPool:
    """Hands out block ids 1 .. num_blocks - 1. A block is free again when its last holder lets go.

    Args:
        num_blocks: blocks of the cache, the scratch block included.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(SCRATCH_BLOCK + 1, num_blocks))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks; the caller made sure that there are so many."""
        assert 0 <= count <= len(self._free), "allocation beyond the pool"
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            assert self._holders[block] == 0
            self._holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """Adds a holder to blocks that are in use."""
        for block in blocks:
            assert self._holders[block] > 0, "sharing a free block"
            self._holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Takes one holder from each block; those without holders are free at once."""
        for block in blocks:
            assert self._holders[block] > 0, "releasing a free block"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def num_holders(self, block: int) -> int:
        """How many hold this block."""
        return self._holders[block]
