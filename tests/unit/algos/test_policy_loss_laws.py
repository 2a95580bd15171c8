"""Laws that hold for every registered policy loss, over random batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algos import agg_loss, get_policy_loss_fn, global_share
from verl.config import ActorConfig, as_config, names

EXAMPLES = settings(max_examples=6)
# These choose tokens within the micro-batch they see.
SELECTING = ("clip_cov", "kl_cov")
seeds = st.integers(0, 2**31)
not_selecting = pytest.mark.parametrize("name", [name for name in names.POLICY_LOSSES if name not in SELECTING])
every_loss = pytest.mark.parametrize("name", names.POLICY_LOSSES)
every_mode = pytest.mark.parametrize("mode", names.LOSS_AGG_MODES)


def config_of(name: str) -> ActorConfig:
    clip_cov = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1}
    return as_config(
        ActorConfig, {"clip_ratio": 0.3, "policy_loss": {"loss_mode": name, "kl_cov_ratio": 0.2, **clip_cov}}
    )


CONFIGS = {name: config_of(name) for name in names.POLICY_LOSSES}


def random_batch(seed: int, rows: int = 4, width: int = 5) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(rows, width, generator=rng) < 0.7
    mask[:, 0] = True
    old = -draw(rows, width).abs()
    return {
        "old_log_prob": old,
        "log_prob": old + 0.3 * draw(rows, width),
        # One advantage per sequence: where it varies, gspo's gradient is by design not that of its value.
        "advantages": draw(rows, 1).expand(rows, width).clone(),
        "response_mask": mask.long(),
    }


def run(name: str, batch: dict[str, torch.Tensor], mode: str = "token-mean") -> tuple[torch.Tensor, dict]:
    return get_policy_loss_fn(name)(**batch, loss_agg_mode=mode, config=CONFIGS[name])


def gradient(name: str, batch: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    log_prob = batch["log_prob"].clone().requires_grad_()
    run(name, batch | {"log_prob": log_prob}, mode)[0].backward()
    return log_prob.grad


def finite_differences(function, at: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    slopes = torch.zeros_like(at)
    for position in range(at.numel()):
        shift = torch.zeros_like(at)
        shift.view(-1)[position] = step
        slopes.view(-1)[position] = (function(at + shift) - function(at - shift)) / (2 * step)
    return slopes


def without_cispo_weights(batch: dict[str, torch.Tensor], mode: str):
    """CISPO's weight is a constant: its gradient is that of the loss with the weight held where it is."""
    weight = (batch["log_prob"] - batch["old_log_prob"]).exp().clamp(0.7, 1.3)
    factor = CONFIGS["cispo"].loss_scale_factor
    return lambda log_prob: agg_loss(
        -weight * batch["advantages"] * log_prob, batch["response_mask"], mode, loss_scale_factor=factor
    )


@every_loss
@every_mode
def test_the_gradient_matches_finite_differences(name, mode):
    for seed in range(2):
        batch = random_batch(seed)
        function = lambda log_prob, batch=batch: run(name, batch | {"log_prob": log_prob}, mode)[0]  # noqa: E731
        if name == "cispo":
            function = without_cispo_weights(batch, mode)
        expected = finite_differences(function, batch["log_prob"])
        torch.testing.assert_close(gradient(name, batch, mode), expected, rtol=1e-5, atol=1e-8)


@not_selecting
@every_mode
@EXAMPLES
@given(seed=seeds, cut=st.integers(1, 5))
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(name, mode, seed, cut):
    batch = random_batch(seed, rows=6)
    tokens = batch["response_mask"].sum().item()
    loss, slopes, metrics = 0.0, [], 0.0
    for rows in (slice(0, cut), slice(cut, None)):
        part = {key: value[rows] for key, value in batch.items()}
        share = global_share(part["response_mask"], mode, tokens, 6)
        part_loss, part_metrics = run(name, part, mode)
        loss += part_loss * share
        slopes.append(gradient(name, part, mode) * share)
        metrics += part_metrics["approx_kl"] * part["response_mask"].sum() / tokens
    whole, whole_metrics = run(name, batch, mode)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(torch.cat(slopes), gradient(name, batch, mode))
    torch.testing.assert_close(metrics.double(), whole_metrics["approx_kl"].double(), rtol=1e-5, atol=1e-7)


@every_loss
@EXAMPLES
@given(seed=seeds, garbage=st.sampled_from([5.0, float("nan"), float("inf"), float("-inf")]))
def test_masked_tokens_contribute_nothing_whatever_they_hold(name, seed, garbage):
    batch = random_batch(seed)
    off = batch["response_mask"] == 0
    spoilt = {k: v.masked_fill(off, garbage) if v.is_floating_point() else v for k, v in batch.items()}
    loss, metrics = run(name, batch)
    spoilt_loss, spoilt_metrics = run(name, spoilt)
    torch.testing.assert_close(spoilt_loss, loss)
    torch.testing.assert_close(spoilt_metrics, metrics)
    slope = gradient(name, spoilt, "token-mean")
    assert not slope[off].any()
    torch.testing.assert_close(slope, gradient(name, batch, "token-mean"))


@every_loss
@EXAMPLES
@given(seed=seeds, columns=st.integers(1, 4), at=st.integers(0, 5))
def test_neither_padding_nor_observations_between_turns_matter(name, seed, columns, at):
    """Masked columns inserted anywhere: the same loss and the same gradient of every model token."""
    batch = random_batch(seed)

    def insert(values):
        return torch.cat([values[:, :at], values.new_full((4, columns), 7), values[:, at:]], dim=1)

    longer = {key: insert(value) for key, value in batch.items()}
    longer["response_mask"][:, at : at + columns] = 0
    torch.testing.assert_close(run(name, longer)[0], run(name, batch)[0])
    slope = gradient(name, longer, "token-mean")
    assert not slope[:, at : at + columns].any()
    kept = torch.cat([slope[:, :at], slope[:, at + columns :]], dim=1)
    torch.testing.assert_close(kept, gradient(name, batch, "token-mean"))


@pytest.mark.parametrize("name", [name for name in names.POLICY_LOSSES if name != "clip_cov"])  # it draws lots
@every_mode
def test_the_order_of_the_rows_does_not_matter(name, mode):
    batch = random_batch(3)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = {key: value[order] for key, value in batch.items()}
    torch.testing.assert_close(run(name, shuffled, mode)[0], run(name, batch, mode)[0])
    torch.testing.assert_close(gradient(name, shuffled, mode), gradient(name, batch, mode)[order])


@not_selecting
@EXAMPLES
@given(seed=seeds)
def test_an_unchanged_policy_takes_the_plain_policy_gradient(name, seed):
    batch = random_batch(seed)
    batch["old_log_prob"] = batch["log_prob"].clone()
    tokens = batch["response_mask"].sum()
    expected = -batch["advantages"] * batch["response_mask"] / tokens
    torch.testing.assert_close(gradient(name, batch, "token-mean"), expected)


@every_loss
@EXAMPLES
@given(seed=seeds)
def test_rollout_weights_of_one_change_nothing_and_of_zero_leave_nothing(name, seed):
    batch = random_batch(seed)
    plain = run(name, batch)[0]
    torch.testing.assert_close(run(name, batch | {"rollout_is_weights": torch.ones(4, 5)})[0], plain)
    assert run(name, batch | {"rollout_is_weights": torch.zeros(4, 5)})[0] == 0


@every_loss
def test_a_token_that_became_far_likelier_keeps_loss_and_gradient_finite(name):
    batch = random_batch(0)
    batch["old_log_prob"] = batch["old_log_prob"] - 400.0
    assert run(name, batch)[0].isfinite()
    assert gradient(name, batch, "token-mean").isfinite().all()


@every_loss
def test_no_gradient_flows_into_advantages_or_the_old_policy(name):
    batch = random_batch(0)
    for key in ("log_prob", "old_log_prob", "advantages"):
        batch[key].requires_grad_()
    run(name, batch)[0].backward()
    assert batch["log_prob"].grad is not None
    assert batch["old_log_prob"].grad is None
    assert batch["advantages"].grad is None


@every_loss
@every_mode
def test_a_micro_batch_of_filler_rows_costs_nothing(name, mode):
    batch = random_batch(0)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    loss, metrics = run(name, batch, mode)
    assert loss == 0
    assert not gradient(name, batch, mode).any()
    assert all(value == 0 for value in metrics.values())


@every_loss
def test_loss_and_metrics_are_float32_for_half_precision_input(name):
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in random_batch(0).items()}
    loss, metrics = run(name, batch)
    assert loss.dtype == torch.float32
    assert {value.requires_grad for value in metrics.values()} == {False}
