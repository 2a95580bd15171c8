"""Moments in bfloat16 train as float32 ones do, at half of the memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.engine_cases import make_batch, make_engine, token_loss, whole_weights
from tests.support.tiny import tiny_model
from verl.config import OptimConfig, as_config
from verl.types.weights import bucketed
from verl.workers.engine.common.optim import round_stochastically
from verl.workers.engine.fsdp import optimizer
from verl.workers.engine.fsdp.optimizer import ShardedAdamW


class OneRank:
    """As much of a mesh as an optimizer of plain parameters asks for."""

    def get_group(self, name):
        return None


def learn(state_dtype, steps=200, seed=0):
    """A small network on noisy data; the loss of every step and the optimizer."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(256, 8, generator=draw)
    targets = torch.tanh(inputs[:, :3].sum(1, keepdim=True)) + 0.1 * torch.randn(256, 1, generator=draw)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optim = as_config(OptimConfig, {"lr": 3e-3, "state_dtype": state_dtype}, at="actor_rollout_ref.actor.optim")
    optimizer = ShardedAdamW(dict(model.named_parameters()), optim, OneRank())
    losses = []
    for _ in range(steps):
        rows = torch.randint(0, 256, (64,), generator=draw)
        loss = (model(inputs[rows]) - targets[rows]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, optimizer, [parameter.detach().clone() for parameter in model.parameters()]


def test_training_curves_of_both_precisions_agree():
    exact, _, weights = learn("fp32")
    half, _, half_weights = learn("bf16")
    assert exact[-1] < 0.7 * exact[0], "the problem is learnt at all"
    late = slice(-50, None)
    mean = lambda losses: sum(losses[late]) / 50  # noqa: E731
    assert mean(half) == pytest.approx(mean(exact), rel=0.02)
    moved = sum(float((a - b).square().sum()) for a, b in zip(weights, half_weights, strict=True)) ** 0.5
    length = sum(float(a.square().sum()) for a in weights) ** 0.5
    assert 0 < moved / length < 0.05


def test_the_second_moment_follows_its_float32_twin_where_rounding_to_the_nearest_stands_still():
    beta, gradient = 0.999, 1.0
    exact = torch.full((2000,), 4.0)
    nearest, at_random = exact.bfloat16(), exact.bfloat16()
    noise = torch.Generator().manual_seed(0)
    for _ in range(300):
        exact = beta * exact + (1 - beta) * gradient**2
        nearest = (beta * nearest.float() + (1 - beta) * gradient**2).bfloat16()
        working = beta * at_random.float() + (1 - beta) * gradient**2
        round_stochastically(working, noise)
        at_random = working.bfloat16()
    assert (nearest == 4.0).all(), "a step of 0.075 % is less than half of bfloat16's spacing"
    assert float(exact[0]) < 3.3
    assert float(at_random.float().mean()) == pytest.approx(float(exact[0]), rel=0.01)


@settings(max_examples=50)
@given(value=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False))
def test_rounding_gives_one_of_the_two_neighbours_and_the_value_itself_on_average(value):
    values = torch.full((4096,), value)
    round_stochastically(values, torch.Generator().manual_seed(0))
    assert torch.equal(values.bfloat16().float(), values)
    low, high = float(values.min()), float(values.max())
    spacing = abs(value) * 2**-7 + 1e-38
    assert low <= value <= high or abs(value - low) <= spacing / 100
    assert high - low <= spacing
    assert float(values.double().mean()) == pytest.approx(value, abs=spacing / 20)


def test_moments_take_half_of_the_memory_between_steps():
    sizes = {}
    for dtype in ("fp32", "bf16"):
        _, optimizer, _ = learn(dtype, steps=2)
        sizes[dtype] = sum(value.nbytes for key, value in optimizer.tensors().items() if "exp_avg" in key)
    assert sizes["bf16"] * 2 == sizes["fp32"] > 0


def test_how_moments_are_cut_into_portions_changes_nothing_but_the_noise(monkeypatch):
    assert list(bucketed([("a", 5), ("b", 3), ("c", 9), ("d", 1)], 8)) == [["a", "b"], ["c"], ["d"]]
    monkeypatch.setattr(optimizer, "PORTION", 8)
    first, *_ = learn("bf16", steps=20)
    monkeypatch.setattr(optimizer, "PORTION", 1 << 25)
    second, *_ = learn("bf16", steps=20)
    assert first == pytest.approx(second, rel=1e-2)
    assert first[0] == second[0]


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")])
def test_a_checkpoint_keeps_its_precision_and_loads_into_another(saved, loaded, tmp_path):
    data = make_batch(rows=2)
    first = make_engine(tiny_model(num_hidden_layers=1), state_dtype=saved)
    step(first, data)
    first.save(tmp_path)
    second = make_engine(tiny_model(seed=3, num_hidden_layers=1), state_dtype=loaded)
    second.load(tmp_path)
    wanted, found = first.optimizer.tensors(), second.optimizer.tensors()
    moments = [name for name in wanted if "exp_avg" in name]
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    assert {wanted[name].dtype for name in moments} == {dtypes[saved]}
    assert {found[name].dtype for name in moments} == {dtypes[loaded]}
    for name in moments:
        assert torch.equal(found[name].to_local(), wanted[name].to_local().to(dtypes[loaded]))
    step(first, data)
    step(second, data)
    if saved == loaded:  # the noise too goes on where it was
        weights, again = whole_weights(first), whole_weights(second)
        assert all(torch.equal(again[name], weights[name]) for name in weights)


def step(engine, data):
    engine.forward_backward(data, token_loss, ["log_probs"])
    engine.optimizer_step()
