"""BlockManager: allocation and reference counts of KV blocks, and the prefix cache.

The content of a cached block has a unique number. A full block is looked up by (content number of the block before it,
its tokens): equal keys mean equal prefixes, without hash collisions.
"""

from __future__ import annotations

from collections import OrderedDict

from verl.inference.sequence import Sequence

__all__ = ["BlockManager"]

_Key = tuple[int, tuple[int, ...]]


class BlockManager:
    """Allocates blocks to sequences. A block without references is free, but stays in the prefix cache until it is
    allocated again. Every operation costs O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.references = [0] * num_blocks
        # A stack: blocks with low numbers are allocated first.
        self.uncached_free = list(range(num_blocks - 1, -1, -1))
        # Free blocks in the prefix cache, least recently used first.
        self.cached_free: OrderedDict[int, None] = OrderedDict()
        self.block_by_key: dict[_Key, int] = {}
        self.key_by_block: list[_Key | None] = [None] * num_blocks
        self._content_by_block = [0] * num_blocks
        self._last_content = 0
        self._epoch = 0
        # Content number of the empty prefix under the current weights, by adapter.
        self._roots: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, including cached ones without references."""
        return len(self.uncached_free) + len(self.cached_free)

    def num_blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # ---------------------------------------------------------------- a sequence's blocks

    def can_allocate(self, sequence: Sequence, spare: int = 0) -> bool:
        """Whether the sequence's tokens fit, with `spare` blocks left."""
        missing = self.num_blocks_for(len(sequence.token_ids)) + spare - self.free_blocks
        if missing <= 0:
            return True
        return missing <= sum(self.references[block] > 0 for block in self._cached_prefix(sequence))

    def allocate(self, sequence: Sequence) -> None:
        """Allocate blocks for all tokens of the sequence; sets `num_computed_tokens` to those found in the cache."""
        references = self.references
        table = self._cached_prefix(sequence)
        for block in table:
            if references[block] == 0:
                del self.cached_free[block]
            references[block] += 1
        sequence.num_computed_tokens = len(table) * self.block_size
        if not sequence.output.token_ids:
            sequence.output.cached_tokens = sequence.num_computed_tokens
        sequence.cached_blocks = len(table)
        sequence.cached_content = self._content_by_block[table[-1]] if table else self._root(sequence)
        sequence.cached_epoch = self._epoch
        table += [self._pop_free() for _ in range(self.num_blocks_for(len(sequence.token_ids)) - len(table))]
        sequence.block_table = table

    def append(self, sequence: Sequence) -> int:
        """Allocate one more block. Requires a free one."""
        block = self._pop_free()
        sequence.block_table.append(block)
        return block

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Share the parent's full blocks with the child, which has the same tokens.

        A partly filled last block is not shared: the child gets a copy, which needs a free block. Returns the pair
        (from, to) of blocks to copy once the step has written the parent's KV; an empty list if there is no such block.
        """
        full, remainder = divmod(len(child.token_ids), self.block_size)
        child.block_table = parent.block_table[:full]
        for block in child.block_table:
            self.references[block] += 1
        child.num_computed_tokens = parent.num_computed_tokens
        child.cached_blocks = parent.cached_blocks
        child.cached_content = parent.cached_content
        child.cached_epoch = parent.cached_epoch
        return [(parent.block_table[full], self.append(child))] if remainder else []

    def deallocate(self, sequence: Sequence) -> None:
        """Release the sequence's blocks; full ones stay in the prefix cache."""
        self.cache_full_blocks(sequence)
        # In reverse, so that the end of a prefix is evicted first.
        for block in reversed(sequence.block_table):
            references = self.references[block] - 1
            assert references >= 0, f"block {block} was released twice"
            self.references[block] = references
            if references == 0:
                if self.key_by_block[block] is None:
                    self.uncached_free.append(block)
                else:
                    self.cached_free[block] = None
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    # ---------------------------------------------------------------- the prefix cache

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Add the sequence's full blocks to the prefix cache."""
        if not self.prefix_caching or sequence.cached_epoch != self._epoch:
            return
        size, tokens, content = self.block_size, sequence.token_ids, sequence.cached_content
        full = min(sequence.num_computed_tokens, len(tokens)) // size
        for index in range(sequence.cached_blocks, full):
            key = (content, tuple(tokens[index * size : (index + 1) * size]))
            block = self.block_by_key.get(key)
            if block is None:
                block = sequence.block_table[index]
                self.block_by_key[key] = block
                self.key_by_block[block] = key
                self._last_content += 1
                self._content_by_block[block] = self._last_content
            content = self._content_by_block[block]
        sequence.cached_blocks = max(full, sequence.cached_blocks)
        sequence.cached_content = content

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: the weights changed or the memory was released. Blocks in use stay allocated."""
        self._epoch += 1
        self._roots.clear()
        self.block_by_key.clear()
        self.key_by_block = [None] * self.num_blocks
        self.uncached_free.extend(self.cached_free)
        self.cached_free.clear()

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix, without its last token, which must be computed for its logits."""
        blocks: list[int] = []
        if not self.prefix_caching or sequence.params.prompt_log_probs:
            return blocks
        size, content, tokens = self.block_size, self._root(sequence), sequence.token_ids
        for start in range(0, len(tokens) - size, size):
            block = self.block_by_key.get((content, tuple(tokens[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            content = self._content_by_block[block]
        return blocks

    def _root(self, sequence: Sequence) -> int:
        """Content number of the empty prefix: KV of different adapters, or of different weights, is not shared."""
        adapter = sequence.adapter.id
        if adapter not in self._roots:
            self._last_content += 1
            self._roots[adapter] = self._last_content
        return self._roots[adapter]

    def _pop_free(self) -> int:
        """Allocate a free block: an uncached one if possible, else the least recently used cached one."""
        if self.uncached_free:
            block = self.uncached_free.pop()
        else:
            block, _ = self.cached_free.popitem(last=False)
            key, self.key_by_block[block] = self.key_by_block[block], None
            assert key is not None
            del self.block_by_key[key]
        self.references[block] = 1
        return block
