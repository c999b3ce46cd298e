"""Which blocks a request can take over from others that began with the same tokens.

A block's key is a hash of its tokens and of the key before it, so it stands for everything up to its end. The first
key of a request with a `cache_salt` hangs on the salt, so only requests with the same one can meet.

Only whole units are shared. In fast numerics a unit is a block. In exact numerics the bits of keys and values are a
function of the shape they were computed in, so a unit is made of full chunks of a prompt, and no output is shared.
"""

import hashlib
import math

from compspec.request import Request
from compspec.scheduling.block_pool import BlockPool


class PrefixCache:
    """Finds and keeps full blocks of verified tokens.

    Args:
        pool: the blocks; it also decides which contents are lost.
        chunk: exact numerics: tokens of a full prompt chunk; None: blocks of any verified tokens are kept.
    """

    def __init__(self, pool: BlockPool, chunk: int | None) -> None:
        self._pool = pool
        self._prompt_only = chunk is not None
        self._unit = math.lcm(pool.block_size, chunk or 1)

    def find(self, request: Request) -> list[int]:
        """The blocks that follow what the request has and hold what it would compute next, in whole units.

        At least one token is left to compute, because the next is sampled from its logits.
        """
        num_computed, size = request.num_computed_tokens, self._pool.block_size
        if num_computed % self._unit or len(request.block_ids) * size != num_computed:
            return []
        end = self._whole_units(request, request.num_tokens - 1)
        if end <= num_computed:
            return []
        found = self._pool.find(self._keys(request, end)[num_computed // size :])
        return found[: len(found) * size // self._unit * self._unit // size]

    def take(self, request: Request) -> None:
        """Gives the request what `find` finds."""
        found = self.find(request)
        self._pool.hold(found)
        request.block_ids = [*request.block_ids, *found]
        request.num_kept_blocks += len(found)
        num_tokens = len(found) * self._pool.block_size
        request.num_computed_tokens += num_tokens
        if request.stats.num_preemptions == 0:
            request.stats.num_cached_tokens += num_tokens

    def keep(self, request: Request, num_computed_tokens: int) -> None:
        """Lets others find a request's blocks.

        Args:
            num_computed_tokens: so many tokens from the first are final in its blocks, for every model that uses them.
        """
        num_blocks = self._whole_units(request, min(num_computed_tokens, request.num_tokens)) // self._pool.block_size
        if num_blocks <= request.num_kept_blocks:
            return
        keys = self._keys(request, num_blocks * self._pool.block_size)
        for index in range(request.num_kept_blocks, num_blocks):
            self._pool.set_key(request.block_ids[index], keys[index])
        request.num_kept_blocks = num_blocks

    def _whole_units(self, request: Request, num_tokens: int) -> int:
        if self._prompt_only:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        return num_tokens // self._unit * self._unit

    def _keys(self, request: Request, num_tokens: int) -> list[bytes]:
        """Of the blocks of the first `num_tokens`; the request remembers them, for its tokens never change."""
        keys, size = request.block_keys, self._pool.block_size
        key = keys[-1] if keys else _root(request.params.cache_salt)
        for index in range(len(keys), num_tokens // size):
            tokens = request.token_ids[index * size : (index + 1) * size].tobytes()
            key = hashlib.sha256(key + tokens).digest()
            keys.append(key)
        return keys[: num_tokens // size]


def _root(salt: str | None) -> bytes:
    """What the first key hangs on."""
    if salt is None:
        return b""
    # Keys are hashes of int32 tokens, after nothing or 32 bytes. A hash of 33 bytes is none of them, whatever the salt.
    return hashlib.sha256(hashlib.sha256(salt.encode()).digest() + b"s").digest()
