"""Answers of a step over ranks and micro-batches: each once, prompts whole where they fit, one gradient for any cut."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos.preference import preference_loss, score_gradients
from verl.protocol import DataProto
from verl.trainer.supervised.rm import (
    PROMPT,
    batch_pairs,
    collate_comparisons,
    distribute_to_ranks,
    score_rows,
    whole_prompts,
)
from verl.workers.engine.base import Counts, MicroBatching
from verl.workers.engine.common.micro_batches import SET_COLUMN, micro_batch_rows, row_lengths
from verl.workers.roles.supervised import GRADIENT_COLUMN, INDEX_COLUMN, PAIRS_COLUMN, TOKENS, PreferenceLoss

CENTERING = 0.05
PAIR = st.tuples(st.sampled_from([0.5, 0.7, 1.0]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 1.0, 3.0]))


@st.composite
def prompts(draw):
    """An item with 2 to 5 answers, each compared with the one before it, and some with others."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=2, max_size=5))
    pairs = [(at, at - 1, *draw(PAIR)) for at in range(1, len(lengths))]
    pairs += [(0, at, *draw(PAIR)) for at in range(2, len(lengths)) if draw(st.booleans())]
    return {
        "answers": [torch.ones(length, dtype=torch.long) for length in lengths],
        "answer_tokens": lengths,
        "pairs": torch.tensor(pairs, dtype=torch.float64),
    }


MICRO = st.one_of(
    st.integers(1, 8).map(lambda size: MicroBatching(size=size)),
    st.integers(20, 90).map(lambda tokens: MicroBatching(max_tokens=tokens)),
)


def step_rows(items, micro, ranks, scores):
    """As the trainer makes them, of a model that gives `scores` [answers]."""
    columns = collate_comparisons(items, 0)
    pairs, places = batch_pairs(columns), torch.arange(len(scores))
    whole = whole_prompts(columns[PROMPT], columns["attention_mask"].sum(dim=1), micro, ranks)
    slopes = score_gradients(scores, pairs[~whole[pairs.chosen]], CENTERING, float(pairs.weight.sum()))
    made = {name: columns[name] for name in TOKENS} | {
        INDEX_COLUMN: places,
        SET_COLUMN: torch.where(whole, columns[PROMPT], len(scores) + places),
        PAIRS_COLUMN: columns[PAIRS_COLUMN].where(whole[:, None, None], -1.0),
        GRADIENT_COLUMN: slopes,
    }
    return distribute_to_ranks(DataProto.from_dict(made), ranks), pairs


@settings(deadline=None, max_examples=40)
@given(items=st.lists(prompts(), min_size=1, max_size=6), micro=MICRO, ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_parts_of_every_cut_add_up_to_the_gradient_of_the_whole(items, micro, ranks, seed):
    count = sum(len(item["answers"]) for item in items)
    scores = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    rows, pairs = step_rows(items, micro, ranks, scores.detach())
    expected = preference_loss(scores, pairs, CENTERING)
    (gradient,) = torch.autograd.grad(expected, scores)
    given_scores = torch.cat([scores, torch.zeros(len(rows) - count)])
    loss, weight, found = PreferenceLoss(CENTERING), float(pairs.weight.sum()), torch.zeros(count)
    for part in rows.chunk(ranks):
        for cut in micro_batch_rows(row_lengths(part), micro, together=part.batch[SET_COLUMN].tolist()):
            micro_batch = part.select_idxs(cut)
            output = {"scores": given_scores[micro_batch.batch[INDEX_COLUMN]]}
            part_loss, _ = loss(output, micro_batch, Counts(weight, weight))
            found += torch.autograd.grad(part_loss, scores)[0].float()
    torch.testing.assert_close(found, gradient.float(), rtol=1e-4, atol=1e-6)
    kept = loss.scores_of(rows.batch[INDEX_COLUMN])
    torch.testing.assert_close(kept, given_scores[rows.batch[INDEX_COLUMN]].detach().float())


@settings(deadline=None, max_examples=40)
@given(items=st.lists(prompts(), min_size=1, max_size=6), micro=MICRO, ranks=st.integers(1, 4))
def test_every_answer_is_dealt_once_and_micro_batches_keep_their_limit(items, micro, ranks):
    count = sum(len(item["answers"]) for item in items)
    rows, _ = step_rows(items, micro, ranks, torch.zeros(count))
    assert sorted(rows.batch[INDEX_COLUMN].tolist()) == list(range(len(rows)))
    lengths = rows.batch["attention_mask"].sum(dim=1)
    assert (lengths[rows.batch[INDEX_COLUMN] >= count] == 1).all(), "what fills a rank up costs next to nothing"
    for part in rows.chunk(ranks):
        lengths, together = row_lengths(part), part.batch[SET_COLUMN].tolist()
        for cut in micro_batch_rows(lengths, micro, together=together):
            tokens = sum(lengths[row] for row in cut)
            assert len(cut) == 1 or (tokens <= micro.max_tokens if micro.max_tokens else len(cut) <= micro.size)


def test_pairs_of_like_length_are_whole_on_any_number_of_ranks():
    item = {"answers": [torch.ones(9)] * 2, "answer_tokens": [9, 9], "pairs": torch.tensor([[0, 1, 1.0, 0, 1]])}
    for ranks in (1, 2, 4):
        rows, _ = step_rows([item] * 4, MicroBatching(size=4), ranks, torch.zeros(8))
        assert len(rows) == 8
        assert (rows.batch[SET_COLUMN] < 4).all()


def test_a_prompt_that_would_keep_all_other_ranks_waiting_is_torn():
    lengths, numbers = torch.tensor([5, 5, 50, 50, 50, 50]), torch.tensor([0, 0, 1, 1, 1, 1])
    whole = [whole_prompts(numbers, lengths, MicroBatching(size=4), ranks) for ranks in (1, 2)]
    assert whole[0].all()
    assert whole[1].tolist() == [True, True, False, False, False, False]


def test_answers_that_are_only_scored_are_spread_by_tokens_and_come_back_in_order():
    """Long ones first, as files that are sorted have them: in file order the first rank would do nearly everything."""
    lengths = torch.tensor([90, 80, 70, 60, 50, 4, 3, 2, 1])
    mask = (torch.arange(90) < lengths[:, None]).long()
    for ranks in (1, 2, 4):
        taken = []

        def evaluate(rows, ranks=ranks, taken=taken):
            taken += [sum(row_lengths(part)) for part in rows.chunk(ranks)]
            scores = rows.batch["attention_mask"].sum(dim=1).float()
            return rows.select(batch_keys=[INDEX_COLUMN]).union(DataProto.from_dict({"scores": scores}))

        found = score_rows(evaluate, {"input_ids": mask, "attention_mask": mask}, ranks)
        assert found.tolist() == lengths.tolist()
        assert max(taken) <= {1: 360, 2: 192, 4: 120}[ranks], taken
