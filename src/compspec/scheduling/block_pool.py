"""Blocks of the KV cache, counted by reference. Free blocks may keep what they hold until they are handed out again."""

from collections import OrderedDict
from collections.abc import Sequence

from compspec.batch import SCRATCH_BLOCK


class BlockPool:
    """Hands out block ids 1 .. num_blocks - 1. A block is free again when its last holder lets go.

    A block whose contents are known by a key can be found by it, free or not, until it is handed out anew. Free
    blocks without a key go first; of the others the one that was let go first (least recently used).

    Args:
        num_blocks: blocks of the cache, the scratch block included.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The first is handed out next.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(SCRATCH_BLOCK + 1, num_blocks))
        self._holders = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_keyed(self) -> int:
        """Blocks that can be found by a key."""
        return len(self._by_key)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, and forgets what they hold; the caller made sure that there are so many."""
        assert 0 <= count <= len(self._free), "allocation beyond the pool"
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            assert self._holders[block] == 0
            self._holders[block] = 1
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self._by_key[key]
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that are in use or can be found by a key."""
        for block in blocks:
            assert self._holders[block] > 0 or self._keys[block] is not None, "holding a block without contents"
            self._free.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one holder from each block, the last first; those without holders are free at once."""
        # The end of a prefix is of no use without its beginning, so it is handed out earlier.
        for block in reversed(blocks):
            assert self._holders[block] > 0, "releasing a free block"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def set_key(self, block: int, key: bytes) -> None:
        """Names the contents of a block in use, unless another block in use has them already."""
        assert self._holders[block] > 0, "naming a free block"
        other = self._by_key.get(key)
        if self._keys[block] is not None or (other is not None and self._holders[other] > 0):
            return
        if other is not None:  # free, so it could be handed out at any moment; without a key it is the next
            self._keys[other] = None
            self._free.move_to_end(other, last=False)
        self._by_key[key] = block
        self._keys[block] = key

    def drop_keys(self) -> None:
        """Forgets what blocks hold."""
        self._by_key.clear()
        self._keys = [None] * self.num_blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the leading keys, up to the first that is not there."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_holders(self, block: int) -> int:
        """How many hold this block."""
        return self._holders[block]
