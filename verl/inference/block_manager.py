"""Blocks of KV memory: who holds which, which are shared, and which still hold a prefix that may be asked for again.

A block's content is named by a number that is given out once. A full block is found by (content before it, its
tokens): equal keys mean equal prefixes, without collisions.
"""

from __future__ import annotations

from collections import OrderedDict

from verl.inference.sequence import Sequence

__all__ = ["BlockManager"]

_Key = tuple[int, tuple[int, ...]]


class BlockManager:
    """Counts references. A block nobody references is free; as long as it is not handed out again, it may be found by
    its content. Every operation costs O(1) per block it touches."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        # Low numbers are handed out first.
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Unreferenced blocks with a known prefix, least recently used first.
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._block_by_key: dict[_Key, int] = {}
        self._key_of: list[_Key | None] = [None] * num_blocks
        self._content_of = [0] * num_blocks
        self._last_content = 0
        self._epoch = 0
        # The content "nothing yet, under the present weights".
        self._root = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out, those that are kept for their content included."""
        return len(self._blank) + len(self._reusable)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # ---------------------------------------------------------------- a sequence's blocks

    def can_allocate(self, sequence: Sequence, spare: int = 0) -> bool:
        """Whether there is room for the sequence's tokens, with `spare` blocks left."""
        missing = self.blocks_for(len(sequence.token_ids)) + spare - self.free_blocks
        if missing <= 0:
            return True
        return missing <= sum(self._references[block] > 0 for block in self._known_prefix(sequence))

    def allocate(self, sequence: Sequence) -> None:
        """Blocks for all tokens the sequence has; `computed` says how many of them are there already."""
        references = self._references
        table = self._known_prefix(sequence)
        for block in table:
            if references[block] == 0:
                del self._reusable[block]
            references[block] += 1
        sequence.computed = len(table) * self.block_size
        if not sequence.output.token_ids:
            sequence.output.cached_tokens = sequence.computed
        sequence.cached_blocks = len(table)
        sequence.cached_content = self._content_of[table[-1]] if table else self._root
        sequence.cached_epoch = self._epoch
        table += [self._take() for _ in range(self.blocks_for(len(sequence.token_ids)) - len(table))]
        sequence.block_table = table

    def append(self, sequence: Sequence) -> int:
        """One block more; needs a free one."""
        block = self._take()
        sequence.block_table.append(block)
        return block

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Give the child, which has the same tokens, the parent's blocks; a partly filled last one needs a free block.

        Returns (from, to) of the block the child must have for itself, to be copied once its KV is written.
        """
        full, rest = divmod(len(child.token_ids), self.block_size)
        child.block_table = parent.block_table[:full]
        for block in child.block_table:
            self._references[block] += 1
        child.computed = parent.computed
        child.cached_blocks = parent.cached_blocks
        child.cached_content = parent.cached_content
        child.cached_epoch = parent.cached_epoch
        return [(parent.block_table[full], self.append(child))] if rest else []

    def deallocate(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back; full ones can be found again."""
        self.remember(sequence)
        # Backwards: of a prefix, the end is forgotten first.
        for block in reversed(sequence.block_table):
            references = self._references[block] - 1
            assert references >= 0, f"block {block} was given back twice"
            self._references[block] = references
            if references == 0:
                if self._key_of[block] is None:
                    self._blank.append(block)
                else:
                    self._reusable[block] = None
        sequence.block_table = []
        sequence.computed = 0

    # ---------------------------------------------------------------- the prefix cache

    def remember(self, sequence: Sequence) -> None:
        """Let the sequence's full blocks be found by their content from now on."""
        if not self.prefix_caching or sequence.cached_epoch != self._epoch:
            return
        size, tokens, content = self.block_size, sequence.token_ids, sequence.cached_content
        full = min(sequence.computed, len(tokens)) // size
        for index in range(sequence.cached_blocks, full):
            key = (content, tuple(tokens[index * size : (index + 1) * size]))
            found = self._block_by_key.get(key)
            if found is None:
                found = sequence.block_table[index]
                self._block_by_key[key] = found
                self._key_of[found] = key
                self._last_content += 1
                self._content_of[found] = self._last_content
            content = self._content_of[found]
        sequence.cached_blocks = max(full, sequence.cached_blocks)
        sequence.cached_content = content

    def flush(self) -> None:
        """Forget all content: the weights changed, or the memory was given away. Blocks in use stay in use."""
        self._epoch += 1
        self._last_content += 1
        self._root = self._last_content
        self._block_by_key.clear()
        self._key_of = [None] * self.num_blocks
        self._blank.extend(self._reusable)
        self._reusable.clear()

    def _known_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of the tokens; the last token is left, since it has to be computed."""
        found: list[int] = []
        if not self.prefix_caching or sequence.params.prompt_log_probs:
            return found
        size, content, tokens = self.block_size, self._root, sequence.token_ids
        for start in range(0, len(tokens) - size, size):
            block = self._block_by_key.get((content, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            content = self._content_of[block]
        return found

    def _take(self) -> int:
        """A free block: a blank one, or else the one whose content was not asked for longest."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._reusable.popitem(last=False)
            key, self._key_of[block] = self._key_of[block], None
            assert key is not None
            del self._block_by_key[key]
        self._references[block] = 1
        return block
