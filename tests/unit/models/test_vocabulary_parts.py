"""A vocabulary shared by ranks, padding included, gives the statistics and gradients of the whole on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from tests.support.gloo_threads import run_ranks_in_threads
from tests.unit.models.test_fused_head import ADJUSTMENTS, Allocations, Case, plain_statistics
from verl.models.fused_head import label_statistics
from verl.models.logits import top_tokens, without_padded_rows

VOCAB = 29


def padded_weight(case, ranks, multiple):
    """The head of `case` with rows of garbage up to a multiple that every rank has one of."""
    extra = -VOCAB % (multiple * ranks)
    return torch.cat([case.weight.detach(), torch.full((extra, case.weight.shape[1]), 50.0, dtype=case.weight.dtype)])


def of_rank(rank, group, case, weight, ranks, temperature, adjust, seen=None):
    """Statistics, gradient of hidden states and of this rank's rows."""
    part = weight.chunk(ranks)[rank].clone().requires_grad_()
    hidden = case.hidden.detach().clone().requires_grad_()
    with seen or nullcontext():
        start = rank * len(part)
        found = label_statistics(
            hidden,
            without_padded_rows(part, start, VOCAB),
            case.labels - start,
            temperature,
            True,
            adjust=adjust,
            chunk_rows=4,
            vocab_group=group,
        )
        gradients = torch.autograd.grad((torch.stack(found) * case.loss_weights).sum(), [hidden, part])
    return found, *gradients


def assert_whole(results, case, wanted, **tolerance):
    """`wanted`: statistics of the whole vocabulary."""
    d_hidden, d_weight = case.gradients(wanted)
    for found, rank_d_hidden, _ in results:
        torch.testing.assert_close(found, wanted, **tolerance)
        torch.testing.assert_close(rank_d_hidden, d_hidden, **tolerance)
    joined = torch.cat([part for *_, part in results])
    torch.testing.assert_close(joined[:VOCAB], d_weight, **tolerance)
    assert (joined[VOCAB:] == 0).all(), "padding has no gradient"


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@pytest.mark.parametrize("multiple", [1, 8, 32])  # 32: the last ranks have nothing but padding
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_the_vocabulary_give_the_plain_values_and_gradients(ranks, multiple, adjust):
    case = Case(vocab=VOCAB, bias=False)
    weight = padded_weight(case, ranks, multiple)
    results = run_ranks_in_threads(
        ranks, partial(of_rank, case=case, weight=weight, ranks=ranks, temperature=0.7, adjust=adjust)
    )
    wanted = plain_statistics(case.hidden, case.weight, case.labels, 0.7, adjust=adjust)
    assert_whole(results, case, wanted, rtol=1e-11, atol=1e-11)


def test_half_precision_is_that_of_the_whole_head():
    case = Case(rows=40, vocab=VOCAB, dtype=torch.bfloat16, bias=False)
    weight = padded_weight(case, 2, 8)
    results = run_ranks_in_threads(2, partial(of_rank, case=case, weight=weight, ranks=2, temperature=0.7, adjust=None))
    wanted = label_statistics(case.hidden, case.weight, case.labels, 0.7, True)
    for found, *_ in results:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    # Gradients of hidden states are rounded once per part.
    d_hidden, d_weight = case.gradients(wanted)
    torch.testing.assert_close(results[0][1], d_hidden, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(torch.cat([part for *_, part in results])[:VOCAB], d_weight, rtol=2**-7, atol=2**-7)
    assert torch.equal(results[0][1], results[1][1])


def test_no_rank_ever_has_more_than_a_chunk_of_its_part_of_the_logits():
    case = Case(rows=24, size=2, vocab=VOCAB, dtype=torch.float32, bias=False)
    weight = padded_weight(case, 2, 64)
    seen = [Allocations(), Allocations()]
    run_ranks_in_threads(2, lambda rank, group: of_rank(rank, group, case, weight, 2, 0.7, None, seen[rank]))
    for made in seen:
        most = max(shape.numel() for shape in made.shapes if len(shape) == 2 and shape[1] > case.hidden.shape[1])
        assert most <= 4 * len(weight) // 2


@pytest.mark.parametrize("multiple", [1, 32])  # 32: the last rank has nothing but padding
def test_several_labels_and_the_likeliest_tokens_are_those_of_the_whole_vocabulary(multiple):
    case = Case(vocab=VOCAB, bias=False)
    weight = padded_weight(case, 3, multiple)
    labels = torch.cat([case.labels[:, None], (case.labels[:, None] + torch.arange(1, 4)) % VOCAB], dim=1)

    def asked(rank, group):
        part = weight.chunk(3)[rank].clone().requires_grad_()
        hidden = case.hidden.detach().clone().requires_grad_()
        start = rank * len(part)
        real = without_padded_rows(part, start, VOCAB)
        top = top_tokens(hidden, real, case.labels - start, 0.7, 12, vocab_group=group, first=start)
        found, _ = label_statistics(hidden, real, labels - start, 0.7, False, vocab_group=group)
        return top, found.detach(), *torch.autograd.grad((found**2).sum(), [hidden, part])

    wanted, _ = label_statistics(case.hidden, case.weight, labels, 0.7, False)
    d_hidden, d_weight = torch.autograd.grad((wanted**2).sum(), [case.hidden, case.weight])
    results = run_ranks_in_threads(3, asked)
    for top, found, rank_d_hidden, _ in results:
        torch.testing.assert_close(found, wanted.detach())
        torch.testing.assert_close(rank_d_hidden, d_hidden)
        torch.testing.assert_close(tuple(top), tuple(top_tokens(case.hidden, case.weight, case.labels, 0.7, 12)))
    torch.testing.assert_close(torch.cat([part for *_, part in results])[:VOCAB], d_weight)
