"""Triton kernels of the fused head against float64, on a real GPU; its memory, and that it never waits for the GPU."""

from __future__ import annotations

import pytest
import torch

from verl.models.fused_head import label_statistics
from verl.models.logits import LogitAdjustment

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-17}
ADJUSTMENTS = [LogitAdjustment(), LogitAdjustment(scale=0.5), LogitAdjustment(scale=2.0, softcap=15.0)]
QWEN_VOCAB = 151_936


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def padded(rows, vocab, dtype, spread=4.0):
    """Logits in rows a multiple of 16 apart; what lies between is NaN."""
    place = torch.full((rows, -(-vocab // 16) * 16), torch.nan, device=CUDA, dtype=dtype)
    place[:, :vocab] = torch.randn(rows, vocab, device=CUDA) * spread
    return place[:, :vocab]


def exact(logits, labels, temperature, adjust):
    """log_probs, entropy and log_sum_exp in float64, and the logits they can be differentiated by."""
    logits = logits.double().requires_grad_()
    scaled = adjust(logits) / temperature
    log_p = torch.log_softmax(scaled, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, labels[:, None])[:, 0], entropy, torch.logsumexp(scaled, dim=-1), logits


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("vocab", [2, 37, 8192, 50_257, QWEN_VOCAB])
@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_statistics_and_gradients_of_a_chunk_are_exact(dtype, vocab, adjust):
    from verl.models.fused_head_kernel import logit_gradients, row_statistics

    rows, temperature = 19, 0.7
    logits = padded(rows, vocab, dtype)
    labels = torch.randint(0, vocab, (rows,), device=CUDA)
    planes = torch.empty(4, rows, device=CUDA)
    row_statistics(logits, labels, planes, temperature, adjust.scale, adjust.softcap, True)
    highest, total, weighted, label = planes.double()
    log_probs, entropy, log_sum_exp, leaf = exact(logits, labels, temperature, adjust)
    torch.testing.assert_close((label - highest) - total.log(), log_probs.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(total.log() - weighted / total, entropy.detach(), rtol=1e-5, atol=2e-5)

    d_log_probs, d_entropy = torch.randn(2, rows, device=CUDA)
    for with_entropy in (True, False):
        loss = (log_probs * d_log_probs).sum() + (entropy * d_entropy).sum() * with_entropy
        (wanted,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        place = torch.empty(rows, logits.stride(0), device=CUDA, dtype=dtype)[:, :vocab].copy_(logits)
        logit_gradients(
            place, place, labels, log_sum_exp.detach().float(), entropy.detach().float(), d_log_probs,
            d_entropy if with_entropy else None, temperature, adjust.scale, adjust.softcap,
        )  # fmt: skip
        error = (place.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
        assert error < ROUNDING[dtype], f"relative error {error:.2e}"


def test_tokens_that_cannot_occur_add_nothing_and_what_is_not_a_number_stays_so():
    from verl.models.fused_head_kernel import logit_gradients, row_statistics

    logits = padded(3, 9001, torch.bfloat16)
    logits[0, 100:9000] = -torch.inf
    logits[1, 8000] = torch.nan
    labels = torch.tensor([5, 5, -100], device=CUDA)
    planes = torch.empty(4, 3, device=CUDA)
    row_statistics(logits, labels, planes, 1.0, 1.0, None, True)
    highest, total, weighted, label = planes.double()
    allowed = torch.cat([logits[:1, :100], logits[:1, 9000:]], dim=1)
    log_probs, entropy, _, _ = exact(allowed, labels[:1], 1.0, LogitAdjustment())
    assert float(label[0] - highest[0] - total[0].log()) == pytest.approx(float(log_probs), abs=1e-4)
    assert float(total[0].log() - weighted[0] / total[0]) == pytest.approx(float(entropy), abs=1e-4)
    assert total.isnan().tolist() == [False, True, False]
    assert label[2] == -torch.inf, "the label is in another part of the vocabulary"
    ones = torch.ones(3, device=CUDA)
    log_sum_exps = (highest + total.log()).float()
    logit_gradients(
        logits,
        logits,
        labels,
        log_sum_exps,
        entropy.detach().float().expand(3).contiguous(),
        ones,
        ones,
        1.0,
        1.0,
        None,
    )
    assert (logits[0, 100:9000] == 0).all()
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


def head(rows, size, vocab, dtype):
    hidden = torch.randn(rows, size, device=CUDA).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, size, device=CUDA) * 3 * size**-0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocab, device=CUDA).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, vocab, (rows,), device=CUDA)


def plain_gradients(hidden, weight, bias, labels, temperature, loss_weights, dtype):
    """Of full logits in `dtype`, the rest at least float32."""
    inputs = [value.detach().to(dtype).requires_grad_() for value in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*inputs)
    log_p = torch.log_softmax(logits.to(torch.promote_types(dtype, torch.float32)) / temperature, dim=-1)
    log_probs, entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)
    loss = (torch.stack([log_probs, entropy]) * loss_weights).sum()
    return torch.autograd.grad(loss, inputs), (log_probs.detach(), entropy.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [50_257, QWEN_VOCAB])
def test_values_and_gradients_are_as_near_to_float64_as_those_of_full_logits(dtype, vocab):
    hidden, weight, bias, labels = head(300, 64, vocab, dtype)
    loss_weights = torch.randn(2, 300, device=CUDA)
    found = label_statistics(hidden, weight, labels, 0.7, True, bias=bias, chunk_rows=128)
    ours = torch.autograd.grad((torch.stack(found) * loss_weights).sum(), (hidden, weight, bias))
    arguments = (hidden, weight, bias, labels, 0.7, loss_weights)
    plain, plain_values = plain_gradients(*arguments, dtype)
    true, true_values = plain_gradients(*arguments, torch.float64)
    error = lambda value, wanted: (value.double() - wanted).norm() / wanted.norm()  # noqa: E731
    for mine, theirs, wanted in zip((*found, *ours), (*plain_values, *plain), (*true_values, *true), strict=True):
        assert error(mine, wanted) <= 1.1 * error(theirs, wanted) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_several_labels_of_nearly_certain_rows_are_as_exact_as_rounding_once_allows(dtype, adjust):
    rows, size, vocab, temperature = 200, 64, 9001, 0.7
    hidden, weight, bias, label = head(rows, size, vocab, dtype)
    with torch.no_grad():  # the first token of each row is all but sure, the second as likely as any, two are the same
        hidden.copy_(weight[label] * (40.0 / weight[label].float().square().sum(dim=1, keepdim=True)).to(dtype))
    labels = torch.randint(0, vocab, (rows, 8), device=CUDA)
    labels[:, 0], labels[:, 2], labels[::2, 3] = label, labels[:, 1], -100
    shares = torch.randn(rows, 8, device=CUDA)
    found, entropy = label_statistics(
        hidden, weight, labels, temperature, True, bias=bias, adjust=adjust, chunk_rows=64
    )
    inside = labels >= 0
    ours = torch.autograd.grad((found * shares)[inside].sum() + entropy.sum(), (hidden, weight, bias))

    inputs = [value.detach().double().requires_grad_() for value in (hidden, weight, bias)]
    log_p = torch.log_softmax(adjust(torch.nn.functional.linear(*inputs)) / temperature, dim=-1)
    true = log_p.gather(1, labels.clamp(min=0))
    surprise = -(log_p.exp() * log_p).sum(dim=-1)
    wanted = torch.autograd.grad((true * shares)[inside].sum() + surprise.sum(), inputs)
    torch.testing.assert_close(found[inside].double(), true[inside].detach(), rtol=1e-4, atol=1e-4)
    assert found[~inside].isneginf().all()
    for mine, theirs in zip(ours, wanted, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < max(ROUNDING[dtype], 1e-4), f"relative error {error:.2e}"


def test_the_gradient_of_several_labels_is_rounded_after_its_sum():
    """Forward KL of a teacher that agrees: the parts of a label all but cancel, and what is left is what is learned."""
    from verl.models.fused_head import kernel_gradients

    rows, vocab, top = 64, 9001, 16
    logits = padded(rows, vocab, torch.float32, spread=1.0)
    logits[:, 7] += 16.0  # p = 0.999
    p = logits.double().softmax(dim=-1)
    labels = p.topk(top).indices
    pulls = p.gather(1, labels).float() * 1.01
    d_logits = torch.empty(rows, logits.stride(0), device=CUDA, dtype=torch.bfloat16)[:, :vocab]
    log_sum_exp = torch.logsumexp(logits.double(), dim=-1).float()
    kernel_gradients(logits, d_logits, labels, log_sum_exp, None, pulls, None, 1.0, LogitAdjustment())
    wanted = torch.zeros_like(p).scatter_add(1, labels, pulls.double()) - p * pulls.double().sum(dim=1, keepdim=True)
    # float32 knows a log-total of 17 to 2e-6, and with it a probability of 1.
    torch.testing.assert_close(d_logits.double(), wanted, rtol=2.0**-8, atol=5e-6)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("adjust", ADJUSTMENTS)
def test_gradients_through_a_frozen_head_are_exact_but_for_rounding(dtype, adjust):
    hidden, weight, bias, labels = head(300, 64, 50_257, dtype)
    weight, bias = weight.detach(), bias.detach()
    loss_weights = torch.randn(300, device=CUDA)
    log_probs, _ = label_statistics(hidden, weight, labels, 0.7, False, bias=bias, adjust=adjust, chunk_rows=128)
    (found,) = torch.autograd.grad((log_probs * loss_weights).sum(), hidden)
    leaf = hidden.detach().double().requires_grad_()
    logits = adjust(torch.nn.functional.linear(leaf, weight.double(), bias.double())) / 0.7
    wanted = logits.log_softmax(dim=-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), wanted, rtol=1e-4, atol=1e-4)
    (wanted,) = torch.autograd.grad((wanted * loss_weights).sum(), leaf)
    assert (found.double() - wanted).norm() < 2 * ROUNDING[dtype] * wanted.norm()


def test_a_chunk_and_the_weights_gradient_are_all_the_memory_it_takes():
    rows, size = 16_384, 896
    hidden, weight, _, labels = head(rows, size, QWEN_VOCAB, torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    log_probs, entropy = label_statistics(hidden, weight, labels, 1.0, True)
    (log_probs.sum() + entropy.sum()).backward()
    taken = torch.cuda.max_memory_allocated() - before
    chunk, d_weight, d_hidden = 1.5 * 2**30, QWEN_VOCAB * size * (4 + 2), rows * size * 2
    assert taken < 1.05 * (chunk + d_weight + d_hidden), f"{taken / 1e9:.2f} GB; all logits take 10 GB"


def test_no_pass_waits_for_the_gpu():
    hidden, weight, _, labels = head(512, 64, 9001, torch.bfloat16)
    for mode in ("default", "error"):  # the first time kernels are compiled
        torch.cuda.set_sync_debug_mode(mode)
        try:
            log_probs, entropy = label_statistics(hidden, weight, labels, 0.7, True, chunk_rows=128)
            (log_probs.sum() + entropy.sum()).backward()
            several, _ = label_statistics(hidden, weight, labels[:, None].expand(-1, 3), 0.7, False, chunk_rows=128)
            several.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad.isfinite().all()
