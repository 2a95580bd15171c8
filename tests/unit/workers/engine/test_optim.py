"""Schedules, the loss scale, and steps that are not taken."""

import math

import pytest
import torch

from verl.config import OptimConfig, as_config
from verl.workers.engine.common.optim import (
    NON_FINITE,
    REFUSED,
    SEARCHING,
    LossScale,
    build_optimizer,
    build_schedule,
    restore_schedule,
    skip_reason,
)


def optim(**values):
    return as_config(OptimConfig, values, at="actor_rollout_ref.actor.optim")


def rates(config, total_steps, steps):
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(2))], config)
    schedule = build_schedule(optimizer, config, total_steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found, optimizer, schedule


def test_warmup_rises_linearly_and_cosine_falls_to_its_minimum():
    config = optim(lr=1.0, lr_warmup_steps=2, lr_scheduler="cosine", min_lr_ratio=0.1)
    found, _, _ = rates(config, total_steps=6, steps=8)
    wanted = [0.0, 0.5, 1.0, 0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1, 0.1]
    assert found == pytest.approx(wanted)


def test_the_configs_own_number_of_steps_wins_over_that_of_the_run():
    config = optim(lr=1.0, lr_warmup_steps_ratio=0.5, total_training_steps=4)
    assert rates(config, total_steps=100, steps=4)[0] == pytest.approx([0.0, 0.5, 1.0, 1.0])


def test_a_schedule_that_needs_an_end_says_so():
    config = optim(lr_scheduler="cosine")
    with pytest.raises(ValueError, match="total_training_steps"):
        rates(config, total_steps=None, steps=1)


def test_a_restored_schedule_continues_where_it_was():
    config = optim(lr=1.0, lr_warmup_steps=3, lr_scheduler="cosine")
    wanted, _, _ = rates(config, total_steps=9, steps=9)
    _, optimizer, schedule = rates(config, total_steps=9, steps=0)
    restore_schedule(schedule, optimizer, 4)
    found = []
    for _ in range(5):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert found == wanted[4:]


def test_the_loss_scale_halves_on_overflow_and_doubles_after_patience():
    scale = LossScale(torch.float16, patience=2)
    start = scale.value
    scale.update(finite=False)
    assert scale.value == start / 2
    scale.update(finite=True)
    other = LossScale(torch.float16, patience=2)
    other.load_state_dict(scale.state_dict())
    other.update(finite=True)
    assert other.value == start
    plain = LossScale(torch.bfloat16)
    plain.update(finite=False)
    assert plain.value == 1.0


@pytest.mark.parametrize(("eps", "wanted"), [(1e-8, 1.0), (1.0, 1e-3 / (1e-3 + 1)), (1e-3, 0.5)])
def test_eps_is_added_to_the_size_that_a_gradient_is_divided_by(eps, wanted):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer([weight], optim(lr=1.0, weight_decay=0.0, eps=eps))
    weight.grad = torch.tensor([1e-3])
    optimizer.step()
    assert -weight.item() == pytest.approx(wanted, rel=1e-4)


def test_a_search_for_a_loss_scale_that_does_not_end_is_a_broken_gradient():
    scale, reasons = LossScale(torch.float16), []
    for _ in range(40):
        reasons.append(skip_reason(8.0, math.nan, scale.can_decrease, lr=1e-6, weight_rms=0.02))
        scale.update(finite=False)
    assert reasons == [SEARCHING] * 32 + [NON_FINITE] * 8
    assert not LossScale(torch.bfloat16).can_decrease


@pytest.mark.parametrize(
    ("lr", "weight_rms", "reason"),
    [(1e-6, 0.02, None), (1.9, 0.02, None), (2.1, 0.02, REFUSED), (0.9, 0.0, None), (1.1, 0.0, REFUSED)],
)
def test_a_step_of_a_hundred_times_the_weights_is_refused(lr, weight_rms, reason):
    assert skip_reason(8.0, 1.0, False, lr, weight_rms) == reason
