"""torch_functional against plain torch, finite differences and values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from verl.utils import torch_functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def logits_and_labels(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, generator=generator) * 4).to(dtype)
    return logits, torch.randint(0, shape[-1], shape[:-1], generator=generator)


def plain_logprobs(logits, labels):
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def plain_entropy(logits):
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of three rows at a vocabulary of 17, so that tests cross block borders."""
    monkeypatch.setattr(F, "BLOCK_ELEMENTS", 51)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_and_their_gradient_equal_plain_torch(dtype, small_blocks):
    logits, labels = logits_and_labels(4, 5, 17, dtype=dtype)
    weights = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    result, expected = F.logprobs_from_logits(ours, labels), plain_logprobs(plain, labels)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy_and_its_gradient_equal_plain_torch(dtype, small_blocks):
    logits, _ = logits_and_labels(4, 5, 17, dtype=dtype)
    weights = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    result, expected = F.entropy_from_logits(ours), plain_entropy(plain)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    exact = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(ours.grad, plain.grad, **exact)


def test_gradients_pass_finite_differences(small_blocks):
    logits, labels = logits_and_labels(2, 3, 17, dtype=torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: F.logprobs_from_logits(x, labels), (logits,))
    assert torch.autograd.gradcheck(F.entropy_from_logits, (logits,))


def test_slices_of_logits_give_the_same_without_being_copied(small_blocks):
    logits, labels = logits_and_labels(3, 6, 17)
    logits.requires_grad_()
    cut = logits[:, 1:-1]
    assert not cut.is_contiguous()
    assert next(block.data_ptr() for _, block in F.row_blocks(cut)) == cut.data_ptr()
    result = F.logprobs_from_logits(cut, labels[:, 1:-1])
    torch.testing.assert_close(result, plain_logprobs(cut, labels[:, 1:-1]))
    result.sum().backward()
    assert logits.grad[:, 0].abs().sum() == 0
    assert logits.grad[:, 1].abs().sum() > 0


class Allocations(TorchDispatchMode):
    """Bytes of the distinct storages that operations returned."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []  # so that an address is not used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.kept.append(tensor)
                self.sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("function", ["logprobs", "entropy"])
def test_no_tensor_of_the_size_of_the_logits_is_made_but_the_gradient(function, monkeypatch):
    monkeypatch.setattr(F, "BLOCK_ELEMENTS", 8 * 1000)
    logits, labels = logits_and_labels(4, 64, 1000, dtype=torch.bfloat16)
    logits.requires_grad_()
    cut, own = logits[:, 1:], logits.untyped_storage().data_ptr()
    block = 8 * 1000 * 4
    with Allocations() as forward:
        result = F.logprobs_from_logits(cut, labels[:, 1:]) if function == "logprobs" else F.entropy_from_logits(cut)
    assert max(size for address, size in forward.sizes.items() if address != own) <= block
    with Allocations() as backward:
        torch.autograd.grad(result.sum(), cut)
    large = [size for address, size in backward.sizes.items() if address != own and size > block]
    assert large == [cut.numel() * 2]


def test_uniform_logits_by_hand():
    logits, labels = torch.zeros(2, 8), torch.tensor([0, 7])
    torch.testing.assert_close(F.logprobs_from_logits(logits, labels), torch.full((2,), -math.log(8)))
    torch.testing.assert_close(F.entropy_from_logits(logits), torch.full((2,), math.log(8)))


def test_huge_logits_and_impossible_tokens_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropy = F.logprobs_from_logits(logits, torch.tensor([0, 1])), F.entropy_from_logits(logits)
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -math.log(2)]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(2)]))
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()


def test_a_masked_row_of_nan_logits_spoils_neither_value_nor_gradient():
    logits, labels = logits_and_labels(1, 3, 17)
    logits[0, 2] = math.nan
    logits.requires_grad_()
    mask = torch.tensor([[1, 1, 0]])
    loss = F.masked_mean(F.logprobs_from_logits(logits, labels) + F.entropy_from_logits(logits), mask)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2].abs().sum() == 0


def test_no_rows_and_no_batch_dimension_work():
    assert F.logprobs_from_logits(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)).shape == (0,)
    assert F.entropy_from_logits(torch.zeros(2, 0, 5)).shape == (2, 0)
    assert F.logprobs_from_logits(torch.zeros(5), torch.tensor(3)).shape == ()


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"^labels: .*\(2, 4\) .*\(2, 3, 5\).*\(2, 3\)"):
        F.logprobs_from_logits(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))


VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0]])


def test_masked_statistics_by_hand():
    assert F.masked_sum(VALUES, MASK) == 8
    assert F.masked_sum(VALUES, MASK, axis=-1).tolist() == [3, 5]
    torch.testing.assert_close(F.masked_mean(VALUES, MASK), torch.tensor(8 / 3))
    assert F.masked_mean(VALUES, MASK, axis=0).tolist() == [1, 3.5, 0]
    torch.testing.assert_close(F.masked_var(VALUES, MASK), torch.tensor(13 / 3))
    torch.testing.assert_close(F.masked_var(VALUES, MASK, unbiased=False), torch.tensor(26 / 9))


def test_statistics_of_no_values_are_those_that_change_no_other_rank():
    mean, highest, lowest, std = F.distributed_mean_max_min_std(torch.empty(2, 0))
    assert mean.isnan()
    assert (highest, lowest, std) == (-math.inf, math.inf, 0)


def test_an_empty_mask_gives_zero_and_no_nan():
    off = torch.zeros(2, 3)
    for result in (F.masked_sum(VALUES, off), F.masked_mean(VALUES, off), F.masked_var(VALUES, off)):
        assert result == 0
    assert F.masked_mean(VALUES, off, axis=1).tolist() == [0, 0]
    assert F.masked_whiten(VALUES, off).abs().sum() == 0
    one = torch.tensor([[0, 1, 0], [0, 0, 0]])
    assert F.masked_var(VALUES, one) == 0
    assert F.masked_whiten(VALUES, one).abs().sum() == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "statistic",
    [F.masked_sum, F.masked_mean, F.masked_var, F.masked_whiten, lambda v, m: F.masked_mean(v, m, axis=1)],
)
def test_what_is_masked_contributes_nothing_to_value_or_gradient(poison, statistic):
    poisoned = torch.where(MASK == 1, VALUES, torch.tensor(poison)).requires_grad_()
    clean = VALUES.clone().requires_grad_()
    torch.testing.assert_close(statistic(poisoned, MASK), statistic(clean, MASK))
    (statistic(poisoned, MASK) ** 2).sum().backward()
    (statistic(clean, MASK) ** 2).sum().backward()
    torch.testing.assert_close(poisoned.grad, clean.grad)
    assert poisoned.grad[MASK == 0].abs().sum() == 0


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))
def test_masked_statistics_equal_those_of_the_selected_values(seed, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mask = torch.randint(0, 2, (rows, columns), generator=generator).bool()
    mask[0, 0] = True
    chosen = values[mask]
    torch.testing.assert_close(F.masked_mean(values, mask), chosen.mean())
    torch.testing.assert_close(F.masked_var(values, mask, unbiased=False), chosen.var(unbiased=False))
    if len(chosen) > 1:
        torch.testing.assert_close(F.masked_var(values, mask), chosen.var())
        whitened = F.masked_whiten(values, mask)
        torch.testing.assert_close(whitened[mask], (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt())
        kept_mean = F.masked_whiten(values, mask, shift_mean=False)
        torch.testing.assert_close(kept_mean[mask], whitened[mask] + chosen.mean())


def test_half_precision_counts_are_exact():
    # bfloat16 cannot count past 256; a mean over 10,000 ones must still be 1.
    assert F.masked_mean(torch.ones(10_000, dtype=torch.bfloat16), torch.ones(10_000, dtype=torch.bfloat16)) == 1.0


def test_response_mask_ends_with_the_first_end_token():
    responses = torch.tensor([[5, 2, 7, 2], [5, 6, 7, 8], [2, 2, 2, 2], [9, 5, 3, 1]])
    assert F.get_response_mask(responses, 2).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    several = F.get_response_mask(responses, [2, 9], dtype=torch.bool)
    assert several.dtype == torch.bool
    assert several.long().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_pad_sequence_to_length():
    ids = torch.tensor([[1, 2]])
    assert F.pad_sequence_to_length(ids, 4, 0).tolist() == [[1, 2, 0, 0]]
    assert F.pad_sequence_to_length(ids, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert F.pad_sequence_to_length(ids, 2, 0) is ids


@pytest.mark.parametrize(("truncation", "kept"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_long_input_is_truncated_as_asked(truncation, kept):
    ids, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 1, 1, 1, 1]])
    new_ids, new_mask = F.postprocess_data(ids, mask, 3, 0, truncation=truncation)
    assert new_ids.tolist() == [kept]
    assert new_mask.tolist() == [[1, 1, 1]]


def test_short_input_is_padded_on_the_asked_side_with_mask_zero():
    ids, mask = torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    left = F.postprocess_data(ids, mask, 4, 9)
    assert [part.tolist() for part in left] == [[[9, 9, 1, 2]], [[0, 0, 1, 1]]]
    right = F.postprocess_data(ids, mask, 4, 9, left_pad=False)
    assert [part.tolist() for part in right] == [[[1, 2, 9, 9]], [[1, 1, 0, 0]]]


def test_too_long_input_and_bad_arguments_are_errors_with_the_remedy():
    ids = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^input_ids: 5 tokens .*max_length=3\..*truncation"):
        F.postprocess_data(ids, ids, 3, 0)
    with pytest.raises(ValueError, match=r"^truncation: 'centre' .*left, right"):
        F.postprocess_data(ids, ids, 3, 0, truncation="centre")
    with pytest.raises(ValueError, match=r"^input_ids: .*\(1, 5\) .*attention_mask \(1, 4\)"):
        F.postprocess_data(ids, ids[:, 1:], 3, 0)


def learning_rates(make_schedule, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = make_schedule(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def test_constant_schedule_warms_up_then_stays():
    assert learning_rates(lambda o: F.get_constant_schedule_with_warmup(o, 4), 7) == [0, 0.5, 1, 1.5, 2, 2, 2]
    assert learning_rates(lambda o: F.get_constant_schedule_with_warmup(o, 0), 2) == [2, 2]


def test_cosine_schedule_by_hand():
    rates = learning_rates(lambda o: F.get_cosine_schedule_with_warmup(o, 2, 6, min_lr_ratio=0.1), 9)
    wave = [1, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4, 0, 0, 0]
    assert rates == pytest.approx([0, 1, *(2 * (0.1 + 0.9 * height) for height in wave)])
    with pytest.raises(ValueError, match="min_lr_ratio: 2"):
        F.get_cosine_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)], lr=1), 0, 1, min_lr_ratio=2)


def test_a_schedule_resumes_from_its_state():
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, F.get_cosine_schedule_with_warmup(optimizer, 2, 10)

    optimizer, schedule = make()
    for _ in range(5):
        optimizer.step()
        schedule.step()
    again_optimizer, again = make()
    again.load_state_dict(schedule.state_dict())
    optimizer.step()
    schedule.step()
    again_optimizer.step()
    again.step()
    assert again.get_last_lr() == schedule.get_last_lr()
