"""Packed rows that share prefixes: common prefixes are computed once.

Rows form a prefix tree in depth-first (lexicographic) order: every row shares its longest possible prefix with the row
before it (its *shared tokens*) and adds only its remaining tokens, its *node*. The tokens of all nodes, concatenated in
this order, are the *computed tokens*. All tokens of a row are its *path*; a token attends to those before it on a path.

The tree is numpy on the host; loops run over rows, not over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from verl.models.packing import PackedRows, Packing, Seqlens
from verl.models.ulysses import SequenceParallel
from verl.utils.buffer_sizes import MAX_GATHERED_KEYS
from verl.utils.device import copy_to_device


def prefix_order(rows: Sequence[bytes], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows in depth-first order [b], and for each of them the number of tokens that it shares
    with the row before it [b].

    `rows`: the tokens of each row as `width` bytes per token; tokens are equal if their bytes are. Equal rows keep
    their order.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    arrays = [np.frombuffer(rows[row], dtype=np.uint8) for row in order]
    shared = [0, *(_common_length(arrays[i - 1], arrays[i]) // width for i in range(1, len(order)))]
    return np.array(order, dtype=np.int64), np.array(shared[: len(order)], dtype=np.int64)


def token_bytes(ids: np.ndarray, experts: np.ndarray | None = None) -> np.ndarray:
    """Return [..., bytes per token] uint8 for `prefix_order`: ids [...] and, if given, replayed experts [..., m]."""
    tokens = np.ascontiguousarray(ids).astype(">u4")[..., None].view(np.uint8)
    if experts is None:
        return tokens
    return np.concatenate([tokens, np.ascontiguousarray(experts).view(np.uint8).reshape(*ids.shape, -1)], axis=-1)


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


class PrefixTree:
    """The prefix tree of rows that are given in depth-first order."""

    def __init__(self, lengths: np.ndarray, shared: np.ndarray) -> None:
        """`lengths` [b]: number of tokens of each row, at least 1. `shared` [b]: number of its shared tokens."""
        self.lengths = lengths
        self.shared = shared

    @property
    def node_lengths(self) -> np.ndarray:
        """[b]: number of tokens of each row's node; 0 if the row adds none."""
        return self.lengths - self.shared

    @property
    def total(self) -> int:
        """Number of computed tokens."""
        return int(self.node_lengths.sum())

    @cached_property
    def starts(self) -> np.ndarray:
        """[b + 1]: index of the first computed token of each row's node; the last entry is `total`."""
        return np.concatenate([[0], self.node_lengths.cumsum()])

    @cached_property
    def paths(self) -> list[np.ndarray]:
        """For each row the indices of the computed tokens of its path [length]."""
        paths: list[np.ndarray] = []
        for row, shared in enumerate(self.shared.tolist()):
            own = np.arange(self.starts[row], self.starts[row + 1])
            paths.append(np.concatenate([paths[-1][:shared], own]) if shared else own)
        return paths

    def padded(self, extra: int) -> PrefixTree:
        """Return the tree with one more row, of `extra` tokens that are not shared."""
        return PrefixTree(np.append(self.lengths, extra), np.append(self.shared, 0))


TreeAttention = Literal["gather", "merge"]
"""Implementations of attention over a tree on CUDA (`verl.models.attention`). `gather` copies the keys of every path;
`merge` computes attention to the node and to the shared tokens separately and merges the results."""

# The first three fields of TreeParts are tensors of token indices, the next four tensors of starts, the others numbers.
_INDEX_FIELDS: Final = 3
_TENSOR_FIELDS: Final = 7


class TreeArguments(NamedTuple):
    """`TreeParts` packed into three tensors, so that torch.compile makes one graph for all trees: it would specialise
    on separate arguments that are 0 or 1, or equal by chance."""

    index: torch.Tensor
    """The concatenated `path_keys`, `prefix_queries` and `prefix_keys`."""
    starts: torch.Tensor
    """int32: the concatenated `*_starts`."""
    sizes: torch.Tensor
    """On the host: the lengths of the concatenated tensors, then the numbers of `TreeParts`."""

    @staticmethod
    def from_parts(parts: TreeParts, device: torch.device) -> TreeArguments:
        index = np.concatenate([parts.path_keys, parts.prefix_queries, parts.prefix_keys])
        starts = np.concatenate(
            [parts.node_starts, parts.path_starts, parts.prefix_query_starts, parts.prefix_key_starts]
        )
        lengths = [len(part) for part in parts[:_TENSOR_FIELDS]]
        tensors = torch.from_numpy(index), torch.from_numpy(starts)
        index_on_device, starts_on_device = copy_to_device(tensors, device)
        for tensor in (index_on_device, starts_on_device):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return TreeArguments(index_on_device, starts_on_device, torch.tensor([*lengths, *parts[_TENSOR_FIELDS:]]))

    def parts(self) -> TreeParts:
        """Return the parts; tensors are views."""
        sizes = self.sizes.tolist()
        index = self.index.split(sizes[:_INDEX_FIELDS])
        starts = self.starts.split(sizes[_INDEX_FIELDS:_TENSOR_FIELDS])
        return TreeParts(*index, *starts, *sizes[_TENSOR_FIELDS:])


class TreeParts(NamedTuple):
    """Arguments of the attention kernels for a tree: tensors, or arrays on the host.

    A *group* consists of the nodes whose rows have the same shared tokens.
    """

    path_keys: Any
    """[sum of paths]: indices of the computed tokens of every node's path, whose last tokens are the node itself. Used
    by `gather`."""
    prefix_queries: Any
    """[n]: indices of the computed tokens of the nodes of each group, which attend to all keys of the group. Used by
    `merge`."""
    prefix_keys: Any
    """[m]: indices of the shared tokens of each group. Used by `merge`."""
    node_starts: Any
    """[nodes + 1]: index of the first computed token of each node; the last entry is the number of computed tokens."""
    path_starts: Any
    """[nodes + 1]: start of each path in `path_keys`."""
    prefix_query_starts: Any
    """[groups + 1]: start of each group in `prefix_queries`."""
    prefix_key_starts: Any
    """[groups + 1]: start of each group in `prefix_keys`."""
    longest_node: int
    longest_path: int
    most_queries: int
    """Largest number of queries of a group."""
    longest_prefix: int
    """Largest number of keys of a group."""
    merges: bool
    """Whether the implementation is `merge`; otherwise it is `gather`."""

    @property
    def node_seqlens(self) -> Seqlens:
        """Arguments of a kernel for attention within each node."""
        return self.node_starts, self.node_starts, self.longest_node, self.longest_node

    @property
    def path_seqlens(self) -> Seqlens:
        """Arguments of a kernel for attention of nodes (queries) to their paths (keys)."""
        return self.node_starts, self.path_starts, self.longest_node, self.longest_path

    @property
    def prefix_seqlens(self) -> Seqlens:
        """Arguments of a kernel for attention of the nodes of a group (queries) to their shared tokens (keys)."""
        return self.prefix_query_starts, self.prefix_key_starts, self.most_queries, self.longest_prefix


class ExpandedRows(NamedTuple):
    """Whole paths as independent sequences, for attention implementations that do not support trees."""

    packing: Packing
    tokens: torch.Tensor
    """[sum of paths]: indices of the computed tokens of each path."""
    own: torch.Tensor
    """[total]: for every computed token its position in `tokens`, within the path of the row whose node it belongs
    to."""


class TreePacking(Packing):
    """The packing of the computed tokens of a prefix tree. Its sequences are the nodes, which also attend to the shared
    tokens of their rows."""

    def __init__(
        self,
        tree: PrefixTree,
        token_index: np.ndarray,
        attention: TreeAttention | None = None,
        cu_seqlens: torch.Tensor | None = None,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        """`token_index` [packed tokens]: index of the computed token of each token of the rows packed without sharing.
        `attention`: None selects it by size. `cu_seqlens`: None puts them on the host; they determine the device."""
        self.tree = tree
        self.token_index = token_index
        self._attention = attention
        self._rows_with_nodes = np.flatnonzero(tree.node_lengths)
        lengths = tuple(tree.node_lengths[self._rows_with_nodes].tolist())
        if cu_seqlens is None:
            cu_seqlens = torch.from_numpy(_starts(tree.node_lengths[self._rows_with_nodes]))
        super().__init__(cu_seqlens, lengths, max(lengths, default=0), sequence_parallel)
        self.attention = attention or self._select_attention()
        # Computed before the pass: compiled layers only read attributes.
        self.kernel_arguments = self._kernel_arguments() if self.cu_seqlens.is_cuda else None

    def with_starts(self, cu_seqlens: torch.Tensor) -> TreePacking:
        return TreePacking(self.tree, self.token_index, self._attention, cu_seqlens, self.sequence_parallel)

    def with_sequence_parallel(self, parallel: SequenceParallel) -> TreePacking:
        return TreePacking(self.tree, self.token_index, self._attention, self.cu_seqlens, parallel)

    def padded(self, extra: int) -> TreePacking:
        return TreePacking(self.tree.padded(extra), self.token_index, self._attention)

    def _select_attention(self) -> TreeAttention:
        keys = int(self.tree.lengths[self._rows_with_nodes].sum())
        return "gather" if keys <= MAX_GATHERED_KEYS * self.tree.total else "merge"

    def _kernel_arguments(self) -> TreeArguments:
        tree, rows = self.tree, self._rows_with_nodes
        with_prefix = rows[tree.shared[rows] > 0]
        merges = self.attention == "merge" and len(with_prefix) > 0
        none = np.zeros(0, dtype=np.int64)
        queries, prefix_keys, query_counts, key_counts = self._group_nodes(with_prefix) if merges else (none,) * 4
        parts = TreeParts(
            path_keys=np.concatenate([tree.paths[row] for row in rows]),
            prefix_queries=queries,
            prefix_keys=prefix_keys,
            node_starts=_starts(tree.node_lengths[rows]),
            path_starts=_starts(tree.lengths[rows]),
            prefix_query_starts=_starts(query_counts),
            prefix_key_starts=_starts(key_counts),
            longest_node=self.max_length,
            longest_path=int(tree.lengths[rows].max()),
            most_queries=int(query_counts.max(initial=0)),
            longest_prefix=int(key_counts.max(initial=0)),
            merges=merges,
        )
        return TreeArguments.from_parts(parts, self.cu_seqlens.device)

    def _group_nodes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return queries and keys of the nodes of `rows` (see `TreeParts`), and their number per group."""
        tree = self.tree
        # A prefix is identified by its last token.
        prefixes = np.array([tree.paths[row][tree.shared[row] - 1] for row in rows])
        _, first, group = np.unique(prefixes, return_index=True, return_inverse=True)
        rows_by_group = rows[np.argsort(group, kind="stable")]
        queries = np.concatenate([np.arange(tree.starts[row], tree.starts[row + 1]) for row in rows_by_group])
        keys = np.concatenate([tree.paths[row][: tree.shared[row]] for row in rows[first]])
        query_counts = np.bincount(group, weights=tree.node_lengths[rows]).astype(np.int64)
        return queries, keys, query_counts, tree.shared[rows[first]]

    @cached_property
    def expanded(self) -> ExpandedRows:
        """The paths of all rows with a node, for attention without a kernel."""
        tree = self.tree
        lengths = tree.lengths[self._rows_with_nodes]
        paths = [tree.paths[row] for row in self._rows_with_nodes]
        positions = np.arange(lengths.sum())
        position_in_path = positions - np.repeat(lengths.cumsum() - lengths, lengths)
        own = positions[position_in_path >= np.repeat(tree.shared[self._rows_with_nodes], lengths)]
        tokens, own_positions = self._to_device(torch.from_numpy(np.concatenate(paths)), torch.from_numpy(own))
        packing = Packing.from_lengths(lengths.tolist())
        (starts,) = self._to_device(packing.cu_seqlens)
        return ExpandedRows(packing.with_starts(starts), tokens, own_positions)

    def _to_device(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return copy_to_device(tensors, self.cu_seqlens.device)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each part of a concatenation, and its end, as int32."""
    return np.concatenate([[0], lengths.cumsum()]).astype(np.int32)


def gather_tokens(x: torch.Tensor, index: torch.Tensor, chunks: int = 1) -> torch.Tensor:
    """Return `x.index_select(0, index)`, x [T, m, …], whose gradient is summed in float32: a shared token has one term
    per row, and sums of many terms stagnate in half precision. The sums are computed in `chunks` parts along dimension
    1, which bounds their memory.
    """
    return _GatherTokens.apply(x, index, chunks)


class _GatherTokens(torch.autograd.Function):
    """The autograd function of `gather_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, chunks: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.tokens, ctx.chunks = x.shape[0], chunks
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums = []
        for part in gradient.chunk(ctx.chunks, dim=1):
            total = part.new_zeros((ctx.tokens, *part.shape[1:]), dtype=wide)
            sums.append(total.index_add_(0, index, part.to(wide)).to(gradient.dtype))
        return (sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)), None, None


def share_prefixes(
    rows: PackedRows,
    experts: torch.Tensor | None = None,
    attention: TreeAttention | None = None,
    always: bool = False,
) -> PackedRows:
    """Return `rows` (on the host) with every common prefix computed once; `rows` itself if nothing is shared.

    `experts` [T, ...]: replayed experts of each packed token; tokens with different experts are not shared. `always`:
    return a prefix tree even if nothing is shared.
    """
    tokens = token_bytes(rows.input_ids[0].numpy(), None if experts is None else experts.numpy())
    ends = np.cumsum(rows.packing.lengths)
    begins = ends - rows.packing.lengths
    row_bytes = [tokens[begin:end].tobytes() for begin, end in zip(begins, ends, strict=True)]
    order, shared = prefix_order(row_bytes, tokens.shape[1])
    if not shared.any() and not always:
        return rows
    tree = PrefixTree(np.asarray(rows.packing.lengths, dtype=np.int64)[order], shared)
    token_index = np.empty(rows.packing.total, dtype=np.int64)
    for row, path in zip(order, tree.paths, strict=True):
        token_index[begins[row] : ends[row]] = path
    packing = TreePacking(tree, token_index, attention)
    index = torch.from_numpy(token_index)
    owners = torch.empty(tree.total, dtype=torch.long)
    owners[index] = torch.arange(len(index))  # any of the packed tokens that share a computed token
    return replace(
        rows,
        input_ids=rows.input_ids[:, owners],
        position_ids=rows.position_ids[:, owners],
        packing=packing,
        before=index[rows.before],
        last=index[rows.last],
    )
