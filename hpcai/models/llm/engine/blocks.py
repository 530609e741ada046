"""The blocks of a paged KV cache (Kwon et al. 2023, "PagedAttention"): allocation, sharing of prefixes, eviction.

A block has the keys and values of ``size`` consecutive tokens of a text, in all layers. The key of a full block is a digest of its
tokens and of all tokens before them, so that texts with a common prefix share blocks.
"""

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Sequence

Key = bytes


def extend_keys(keys: list[Key], tokens: Sequence[int], size: int) -> None:
    """Append the keys of the full blocks of ``tokens`` to those of the first blocks."""
    for first in range(len(keys) * size, len(tokens) - size + 1, size):
        parent = keys[-1] if keys else b""
        keys.append(hashlib.blake2b(parent + array("q", tokens[first : first + size]).tobytes(), digest_size=16).digest())


class BlockPool:
    """Allocates ``count`` blocks. The lowest free one is taken first, so that blocks in use lie together, and a cached one that no
    text uses last, of these the least recently used."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = Counter[int]()
        self._empty = list(range(count))  # a heap
        self._evictable: dict[int, None] = {}  # cached blocks without a user, the least recently used first
        self._cached: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated."""
        return len(self._empty) + len(self._evictable)

    def allocate(self) -> int:
        """Return a free block, of which there must be one."""
        if self._empty:
            block = heapq.heappop(self._empty)
        else:
            block = next(iter(self._evictable))
            del self._evictable[block], self._cached[self._keys.pop(block)]
        self._references[block] = 1
        return block

    def share(self, keys: Sequence[Key]) -> list[int]:
        """Return the cached blocks of the longest prefix of a text, which are then in use by it."""
        blocks = list[int]()
        for key in keys:
            if (block := self._cached.get(key)) is None:
                break
            self._evictable.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def cache(self, block: int, key: Key) -> None:
        """Make a full block available to other texts, unless another one with the same tokens is."""
        if key not in self._cached:
            self._cached[key], self._keys[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the blocks of a text. Later ones are evicted first: without those before it, a block is of no use."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                if block in self._keys:
                    self._evictable[block] = None
                else:
                    heapq.heappush(self._empty, block)

    def clear_cache(self) -> None:
        """Make no block available to other texts, since the weights have changed. Texts keep theirs."""
        for block in self._evictable:
            heapq.heappush(self._empty, block)
        for known in (self._evictable, self._cached, self._keys):
            known.clear()
