"""The fused head: values and gradients of plain log_softmax, whatever the chunks, without logits of all rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from verl.models.fused_head import chunk_gradients_, gradients_at_labels, label_statistics
from verl.models.logits import LogitAdjustment, rows_per_chunk, top_tokens
from verl.utils.buffer_sizes import CHUNK_BYTES

ADJUSTMENTS = [None, LogitAdjustment(scale=0.25), LogitAdjustment(scale=2.0, softcap=3.0)]


def plain_statistics(hidden, weight, labels, temperature, bias=None, adjust=None):
    """With all logits at once, by torch alone."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if adjust is None else adjust(logits)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


class Case:
    """Random hidden states, a head and labels; `gradients` of a random loss on the statistics."""

    def __init__(self, rows=11, size=6, vocab=29, dtype=torch.float64, bias=True, seed=0):
        draw = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
        self.hidden, self.weight = normal(rows, size).requires_grad_(), normal(vocab, size).requires_grad_()
        self.bias = normal(vocab).requires_grad_() if bias else None
        self.labels = torch.randint(0, vocab, (rows,), generator=draw)
        self.loss_weights = normal(2, rows)
        self.inputs = [self.hidden, self.weight] + ([self.bias] if bias else [])

    def ours(self, temperature=1.0, adjust=None, chunk_rows=None, with_entropy=True, **options):
        return label_statistics(
            self.hidden,
            self.weight,
            self.labels,
            temperature,
            with_entropy,
            bias=self.bias,
            adjust=adjust,
            chunk_rows=chunk_rows,
            **options,
        )

    def plain(self, temperature=1.0, adjust=None):
        return plain_statistics(self.hidden, self.weight, self.labels, temperature, self.bias, adjust)

    def gradients(self, found):
        return torch.autograd.grad((torch.stack(found) * self.loss_weights).sum(), self.inputs)


def assert_equal_statistics(case, found, wanted, **tolerance):
    torch.testing.assert_close(found, wanted, **tolerance)
    torch.testing.assert_close(case.gradients(found), case.gradients(wanted), **tolerance)


def test_two_tokens_with_logits_one_and_zero_are_as_computed_by_hand():
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    log_probs, entropy = label_statistics(hidden, weight, torch.tensor([0]), 0.5, True)
    # At temperature 0.5 the logits are 2 and 0: p = e^2 / (e^2 + 1).
    p = math.exp(2) / (math.exp(2) + 1)
    assert log_probs.item() == pytest.approx(math.log(p))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    log_probs.sum().backward(retain_graph=True)
    assert weight.grad.flatten().tolist() == pytest.approx([(1 - p) / 0.5, -(1 - p) / 0.5])
    assert hidden.grad.item() == pytest.approx((1 - p) / 0.5)
    weight.grad = None
    entropy.sum().backward()
    # d entropy / d logit = -p (1 - p) (logit difference), here of scaled logits that are 2 apart.
    assert weight.grad[0].item() == pytest.approx(-p * (1 - p) * 2 / 0.5)


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_plain_log_softmax(adjust, temperature, dtype, tolerance):
    for bias in (False, True):
        case = Case(dtype=dtype, bias=bias)
        found = case.ours(temperature, adjust, chunk_rows=4)
        assert_equal_statistics(case, found, case.plain(temperature, adjust), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_gradients_are_those_of_finite_differences(adjust):
    case = Case(rows=3, size=4, vocab=7)
    run = lambda hidden, weight, bias: label_statistics(  # noqa: E731
        hidden, weight, case.labels, 0.7, True, bias=bias, adjust=adjust, chunk_rows=2
    )
    assert torch.autograd.gradcheck(run, tuple(case.inputs))


@settings(max_examples=40)
@given(
    rows=st.integers(0, 9),
    vocab=st.integers(1, 40),
    chunk_rows=st.integers(1, 10),
    temperature=st.floats(0.2, 3.0),
    adjust=st.sampled_from(ADJUSTMENTS),
    seed=st.integers(0, 1000),
)
def test_any_sizes_in_any_chunks_give_the_plain_values_and_gradients(
    rows, vocab, chunk_rows, temperature, adjust, seed
):
    case = Case(rows, 3, vocab, seed=seed)
    found = case.ours(temperature, adjust, chunk_rows)
    assert_equal_statistics(case, found, case.plain(temperature, adjust), rtol=1e-9, atol=1e-9)


def test_each_output_alone_has_its_own_gradient():
    case = Case()
    for index in range(2):
        wanted = torch.autograd.grad(case.plain(0.7)[index].sum(), case.inputs)
        torch.testing.assert_close(torch.autograd.grad(case.ours(0.7, chunk_rows=4)[index].sum(), case.inputs), wanted)
    log_probs, entropy = case.ours(with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(log_probs, case.plain()[0])


def test_a_tied_head_adds_to_the_gradient_of_the_embedding():
    ids = torch.tensor([3, 1, 4, 1])

    def gradient(statistics):
        table = Case().weight.detach().clone().requires_grad_()
        log_probs, entropy = statistics(table[ids].tanh(), table, ids.roll(-1))
        return torch.autograd.grad((log_probs + entropy).sum(), table)

    wanted = gradient(lambda hidden, weight, labels: plain_statistics(hidden, weight, labels, 0.8))
    ours = lambda hidden, weight, labels: label_statistics(hidden, weight, labels, 0.8, True, chunk_rows=3)  # noqa: E731
    torch.testing.assert_close(gradient(ours), wanted)


def test_rows_that_the_loss_leaves_out_give_no_gradient():
    case = Case()
    keep = torch.arange(11) % 3 == 0
    log_probs, entropy = case.ours(chunk_rows=4)
    d_hidden, d_weight, _ = torch.autograd.grad((log_probs + entropy)[keep].sum(), case.inputs)
    assert (d_hidden[~keep] == 0).all()
    alone = label_statistics(case.hidden[keep], case.weight, case.labels[keep], 1.0, True, bias=case.bias)
    torch.testing.assert_close(d_weight, torch.autograd.grad((alone[0] + alone[1]).sum(), case.weight)[0])


def test_no_rows_give_no_statistics_but_a_gradient_of_zero():
    case = Case(rows=0)
    log_probs, entropy = case.ours()
    assert log_probs.shape == entropy.shape == (0,)
    d_hidden, *others = torch.autograd.grad(log_probs.sum() + entropy.sum(), case.inputs)
    assert d_hidden.shape == (0, 6)
    assert all((value == 0).all() for value in others)


def test_a_frozen_head_passes_the_gradient_on_and_gets_none():
    case = Case(dtype=torch.float32)
    wanted = case.gradients(case.plain())[0]
    case.weight.requires_grad_(False), case.bias.requires_grad_(False)
    with Allocations() as made:
        (torch.stack(case.ours(chunk_rows=4)) * case.loss_weights).sum().backward()
    torch.testing.assert_close(case.hidden.grad, wanted)
    assert case.weight.grad is None
    assert case.weight.shape not in made.shapes


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@pytest.mark.parametrize("chunk_rows", [1, 4, 20])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_through_a_frozen_head_are_those_of_plain_log_softmax(adjust, chunk_rows, bias):
    """They are computed in the forward pass: the backward pass multiplies no matrices."""
    case = Case(bias=bias)
    case.labels[3] = 40  # outside the vocabulary
    inside = torch.arange(11) != 3
    case.weight.requires_grad_(False)
    case.bias = None if case.bias is None else case.bias.detach()
    log_probs, entropy = case.ours(0.7, adjust, chunk_rows, entropy_has_gradient=False)
    assert not entropy.requires_grad
    with Products() as products:
        (found,) = torch.autograd.grad((log_probs * case.loss_weights[0])[inside].sum(), case.hidden)
    assert products.count == 0
    assert (found[3] == 0).all()
    alone, nothing = case.ours(0.7, adjust, chunk_rows, with_entropy=False)
    assert nothing is None
    assert torch.equal(alone, log_probs)
    case.labels[3] = 0
    wanted, wanted_entropy = case.plain(0.7, adjust)
    torch.testing.assert_close(log_probs[inside], wanted[inside])
    torch.testing.assert_close(entropy, wanted_entropy)
    (wanted,) = torch.autograd.grad((wanted * case.loss_weights[0])[inside].sum(), case.hidden)
    torch.testing.assert_close(found, wanted)


def test_an_entropy_without_gradient_leaves_the_gradient_of_a_trained_head():
    case = Case()
    log_probs, entropy = case.ours(0.7, chunk_rows=4, entropy_has_gradient=False)
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, case.plain(0.7)[1])
    found = torch.autograd.grad(log_probs.sum(), case.inputs)
    torch.testing.assert_close(found, torch.autograd.grad(case.plain(0.7)[0].sum(), case.inputs))


@pytest.mark.parametrize(
    ("dtype", "certain", "tolerance"),
    [(torch.bfloat16, False, 2**-7), (torch.bfloat16, True, 2**-7), (torch.float16, False, 2**-9)]
    # Probabilities of the other tokens are below the normal numbers of float16, also with a trained head.
    + [(torch.float16, True, 0.012)],
)
def test_gradients_through_a_frozen_head_in_half_precision_are_rounded_twice(dtype, certain, tolerance):
    """Of random tokens, and of tokens whose probability is almost 1."""
    case, exact_case = Case(40, 16, 300, dtype), Case(40, 16, 300, torch.float32)
    if certain:
        case.labels[:] = exact_case.labels[:] = 7
        with torch.no_grad():
            case.bias[7] = 20.0
        case.loss_weights *= 2**10
    exact_case.hidden, exact_case.weight, exact_case.bias = exact_case.inputs = [
        value.detach().float().requires_grad_() for value in case.inputs
    ]
    case.weight.requires_grad_(False), case.bias.requires_grad_(False)
    log_probs, _ = case.ours(0.7, chunk_rows=7, with_entropy=False)
    (found,) = torch.autograd.grad((log_probs * case.loss_weights[0]).sum(), case.hidden)
    (wanted,) = torch.autograd.grad((exact_case.plain(0.7)[0] * case.loss_weights[0]).sum(), exact_case.hidden)
    errors = (found.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert errors.median() < tolerance


def test_logits_of_half_precision_are_not_rounded():
    case = Case(rows=40, vocab=300, dtype=torch.bfloat16)
    exact_case = Case(rows=40, vocab=300, dtype=torch.float32)
    exact = [value.detach().float().requires_grad_() for value in case.inputs]
    exact_case.hidden, exact_case.weight, exact_case.bias = exact_case.inputs = exact
    found, wanted = case.ours(0.7, chunk_rows=7), exact_case.plain(0.7)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for ours, true in zip(case.gradients(found), exact_case.gradients(wanted), strict=True):
        assert ours.dtype == torch.bfloat16
        # What is summed over chunks is rounded once, at the end.
        assert (ours.float() - true).norm() < 2**-8 * true.norm()


def test_a_token_that_cannot_occur_adds_nothing():
    case = Case()
    with torch.no_grad():
        case.bias[5:20] = -torch.inf
        case.labels.clamp_(max=4)
    allowed = [*range(5), *range(20, 29)]
    found = case.ours(0.7, chunk_rows=4)
    wanted = plain_statistics(case.hidden, case.weight[allowed], case.labels, 0.7, case.bias[allowed])
    torch.testing.assert_close(found, wanted)
    for ours, plain in zip(case.gradients(found), case.gradients(wanted), strict=True):
        torch.testing.assert_close(ours, plain)


def test_what_is_not_a_number_stays_so_and_in_its_row():
    case = Case()
    with torch.no_grad():
        case.hidden[2, 1] = torch.nan
    for value in case.ours():
        assert value.isnan().nonzero().flatten().tolist() == [2]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return func(*args, **(kwargs or {}))


class Allocations(TorchDispatchMode):
    """The shapes of all tensors that operations give, views included."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.shapes.add(value.shape)
        return result


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_no_operation_ever_gives_a_tensor_of_more_than_a_chunk_of_logits(adjust):
    rows, size, vocab, chunk = 24, 4, 160, 5
    case = Case(rows, size, vocab, torch.float32)
    with Allocations() as made:
        case.gradients(case.ours(0.7, adjust, chunk))
    assert max(shape.numel() for shape in made.shapes) == chunk * vocab
    assert torch.Size([chunk, vocab]) in made.shapes
    with Allocations() as made:
        case.gradients(case.plain(0.7, adjust))
    assert torch.Size([rows, vocab]) in made.shapes, "the plain way is seen"


def test_only_inputs_and_numbers_per_row_are_kept_for_the_backward_pass():
    kept = []
    case = Case(rows=12, size=8, vocab=1000)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        case.ours(chunk_rows=3)
    given = {value.data_ptr() for value in case.inputs}
    assert all(value.shape == (12,) for value in kept if value.data_ptr() not in given)


def test_without_gradient_nothing_is_kept():
    with torch.no_grad():
        log_probs, entropy = Case().ours()
    assert log_probs.grad_fn is None
    assert entropy.grad_fn is None


def test_chunks_have_one_size_within_the_budget_and_hold_at_least_a_row():
    assert rows_per_chunk(100, 2**30, 4, "cpu") == 1
    assert rows_per_chunk(0, 100, 4, "cpu") == 1
    for rows in (1, 100, 8192, 32768):
        chunk = rows_per_chunk(rows, 151_936, 2, "cuda")
        assert chunk % 128 == 0
        assert chunk * 151_936 * 2 <= CHUNK_BYTES["cuda"]
        count = -(-rows // chunk)
        assert rows > (count - 1) * chunk
        assert chunk - rows / count < 128, "no small chunk is left over"


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_several_labels_at_a_place_have_the_plain_values_and_gradients(adjust):
    case = Case()
    draw = torch.Generator().manual_seed(5)
    labels = torch.cat([case.labels[:, None], torch.randint(0, 29, (11, 4), generator=draw)], dim=1)
    weights = torch.randn(11, 5, generator=draw, dtype=torch.float64)
    bias = {"bias": case.bias, "adjust": adjust}
    found, entropy = label_statistics(case.hidden, case.weight, labels, 0.7, True, chunk_rows=4, **bias)
    plain = [plain_statistics(case.hidden, case.weight, column, 0.7, **bias) for column in labels.unbind(1)]
    wanted = torch.stack([log_probs for log_probs, _ in plain], dim=1)
    torch.testing.assert_close((found, entropy), (wanted, plain[0][1]), rtol=1e-11, atol=1e-11)
    losses = [(value * weights).sum() + h.sum() for value, h in ((found, entropy), (wanted, plain[0][1]))]
    torch.testing.assert_close(*(torch.autograd.grad(loss, case.inputs) for loss in losses), rtol=1e-11, atol=1e-11)
    outside, _ = label_statistics(case.hidden, case.weight, torch.full((11, 1), 29), 1.0, False)
    assert outside.isneginf().all()
    assert not torch.autograd.grad(outside.clamp(min=-9.0).sum(), case.inputs[:1])[0].any()


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_at_labels_are_those_that_all_logits_have_there(adjust, with_entropy):
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 9, generator=draw) * 3
    labels = torch.randint(-2, 11, (40, 6), generator=draw)  # some twice, some in another part of the vocabulary
    pulls, others = torch.randn(40, 6, generator=draw), torch.randn(3, 40, generator=draw)
    log_sum_exp, entropy, d_entropy = others[0] + 9.0, others[1], others[2] if with_entropy else None
    arguments = (labels, log_sum_exp, entropy, pulls, d_entropy, 0.7, adjust or LogitAdjustment())
    before = logits.clone()
    columns, found = gradients_at_labels(logits, *arguments)
    assert torch.equal(logits, before)
    wanted = chunk_gradients_(before, *arguments)
    torch.testing.assert_close(found, wanted.gather(1, columns), rtol=1e-5, atol=1e-6)
    without = chunk_gradients_(logits.clone(), torch.full_like(labels, -1), *arguments[1:])
    torch.testing.assert_close(without.scatter(1, columns, found), wanted, rtol=1e-5, atol=1e-6)


def test_a_nearly_certain_label_among_several_has_its_gradient_rounded_after_the_sum():
    logits, labels = torch.tensor([[9.0, 0.0, 0.0, 0.0]]), torch.tensor([[0, 2]])
    log_p = logits.log_softmax(-1)
    pulls = log_p.exp().gather(1, labels)
    none = torch.full_like(labels, -1)
    arguments = (torch.logsumexp(logits, 1), None, pulls, None, 1.0, LogitAdjustment())
    columns, found = gradients_at_labels(logits, labels, *arguments)
    gradient = chunk_gradients_(logits.clone(), none, *arguments).bfloat16().scatter(1, columns, found.bfloat16())
    p = log_p.double().exp()
    wanted = torch.zeros(1, 4, dtype=torch.double).scatter_add(1, labels, pulls.double()) - p * pulls.double().sum()
    torch.testing.assert_close(gradient.double(), wanted, rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_the_likeliest_tokens_are_those_of_all_logits_at_once(adjust):
    case = Case()
    arguments = (case.hidden, case.weight, case.labels, 0.7)
    found = top_tokens(*arguments, 5, bias=case.bias, adjust=adjust, chunk_rows=4)
    logits = torch.nn.functional.linear(case.hidden, case.weight, case.bias)
    log_p = ((logits if adjust is None else adjust(logits)) / 0.7).log_softmax(-1)
    torch.testing.assert_close(found.top_log_probs, log_p.topk(5).values.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(log_p.gather(1, found.ids).detach(), found.top_log_probs, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.log_probs, case.plain(0.7, adjust)[0].detach(), rtol=1e-11, atol=1e-11)
    assert top_tokens(*arguments, 99).ids.shape == (11, 29), "there are no more"
