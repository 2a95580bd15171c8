"""Which answers of a step are learned together, and on which rank.

A pair is learned in one pass where both its answers are in it. So the answers of a prompt stay together, in one
micro-batch of one rank. A prompt whose answers do not fit is torn: its answers go where they fit, and each is learned
by its slope, which takes a pass that only scores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from verl.protocol import DataProto
from verl.utils.balancing import get_seqlen_balanced_partitions
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.micro_batches import TOGETHER
from verl.workers.roles.supervised import COMPARED, ROW, SLOPES

# A pass that only scores costs a third of one that learns.
_WORTH_A_PASS = 4 / 3


def whole_prompts(prompts: torch.Tensor, lengths: torch.Tensor, micro: MicroBatching, ranks: int) -> torch.Tensor:
    """Whether all answers to a prompt are learned in one pass [answers], by its number and their tokens [answers].

    `micro`: what a pass takes. A prompt that alone gives a rank so much to do that others would wait longer than its
    second pass takes is torn, too.
    """
    tokens = torch.zeros(int(prompts.max()) + 1, dtype=lengths.dtype).index_add(0, prompts, lengths)
    whole = tokens * ranks <= _WORTH_A_PASS * tokens.sum() if ranks > 1 else torch.ones_like(tokens, dtype=torch.bool)
    if micro.max_tokens is not None:
        whole &= tokens <= micro.max_tokens
    elif micro.size is not None:
        whole &= prompts.bincount() <= micro.size
    return whole[prompts]


def scores_of_each(
    evaluate: Callable[[DataProto], DataProto], tokens: Mapping[str, torch.Tensor], ranks: int
) -> torch.Tensor:
    """[answers], whose columns are `tokens`. Equal parts of what `evaluate` is given, one per rank, have about as many
    tokens; it gives back `scores` and `ROW`."""
    places = torch.arange(len(tokens["input_ids"]))
    rows = DataProto.from_dict({**tokens, ROW: places, TOGETHER: places})
    found = evaluate(dealt_to_ranks(rows, ranks))
    return torch.zeros(len(found)).index_copy(0, found.batch[ROW], found.batch["scores"])[: len(places)]


def dealt_to_ranks(rows: DataProto, ranks: int) -> DataProto:
    """The rows in an order in which equal parts, one per rank, hold whole sets (`TOGETHER`) and about as many tokens.

    Ranks with fewer rows are filled up with rows of one token, in no pair.
    """
    if ranks == 1:
        return rows
    lengths = rows.batch["attention_mask"].sum(dim=1).tolist()
    sets: dict[int, list[int]] = {}
    for row, number in enumerate(rows.batch[TOGETHER].tolist()):
        sets.setdefault(number, []).append(row)
    members = list(sets.values()) + [[]] * (-len(sets) % ranks)
    tokens = [sum(lengths[row] for row in one) for one in members]
    parts = get_seqlen_balanced_partitions(tokens, ranks, equal_size=True)
    given = [[row for one in part for row in members[one]] for part in parts]
    most, fillers = max(map(len, given)), iter(range(len(rows), ranks * len(rows)))
    order = [row for part in given for row in [*part, *(next(fillers) for _ in range(most - len(part)))]]
    return _filled(rows, len(order)).select_idxs(torch.tensor(order))


def _filled(rows: DataProto, count: int) -> DataProto:
    """With rows that weigh nothing behind them, `count` in all."""
    known = len(rows)
    rows.padding(count - known)
    columns = rows.batch
    columns["attention_mask"][known:, 1:] = 0
    for name, nothing in ((COMPARED, -1), (SLOPES, 0)):
        if name in columns.keys():
            columns[name][known:] = nothing
    columns[ROW][known:] = torch.arange(known, count)
    columns[TOGETHER][known:] = int(columns[TOGETHER].max()) + 1 + torch.arange(count - known)
    return rows
