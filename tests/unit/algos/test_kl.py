"""KL estimates by hand, on average, and their gradients; the KL coefficient, fixed or adaptive."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from omegaconf import OmegaConf

from verl.algos.kl import (
    KL_ESTIMATES,
    TOP_K_KLS,
    AdaptiveKLController,
    FixedKLController,
    compute_kl_loss,
    get_kl_controller,
    kl_penalty,
    top_k_kl,
)
from verl.algos.masked_ops import global_share
from verl.config import KLControllerConfig, as_config, names

P = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
Q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
BY_HAND = {"k1": 0.4, "abs": 0.4, "k2": 0.08, "k3": math.exp(-0.4) - 1 + 0.4}
SAME = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def test_the_estimates_are_those_the_configuration_knows_and_each_has_a_hand_computed_case():
    assert tuple(KL_ESTIMATES) == names.KL_PENALTIES
    assert set(KL_ESTIMATES) == {*BY_HAND, *SAME}
    assert set(names.KL_LOSS_TYPES) == {*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES)}
    assert tuple(TOP_K_KLS) == names.TOP_K_KLS
    for name in names.KL_LOSS_TYPES:
        kl_penalty(torch.zeros(1), torch.zeros(1), name)


@pytest.mark.parametrize("name", names.KL_LOSS_TYPES)
def test_kl_by_hand(name):
    # log p - log q = -0.6 + 1.0 = 0.4
    value = kl_penalty(torch.tensor([-0.6], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64), name)
    plain = name.removesuffix("+")
    assert value.item() == pytest.approx(BY_HAND[SAME.get(plain, plain)])


@pytest.mark.parametrize("name", names.KL_PENALTIES)
def test_a_straight_through_gradient_leaves_the_value_as_it_was_to_the_bit(name):
    rng = torch.Generator().manual_seed(0)
    policy, reference = (-5 * torch.rand(1000, generator=rng) for _ in range(2))
    plain = KL_ESTIMATES[name](policy - reference)
    for form in (name, f"{name}+"):
        assert torch.equal(kl_penalty(policy.clone().requires_grad_(), reference, form), plain)


@pytest.mark.parametrize("name", ["kl", "k1", "k3", "k1+", "k3+"])
def test_the_mean_of_k1_and_k3_over_samples_of_the_policy_is_the_kl(name):
    expected = (P * (P / Q).log()).sum()
    torch.testing.assert_close((P * kl_penalty(P.log(), Q.log(), name)).sum(), expected)


def mean_gradient(name: str) -> torch.Tensor:
    """Gradient on the logits of the policy, averaged over tokens sampled from it (each with its probability)."""
    logits = P.log().requires_grad_()
    estimates = kl_penalty(torch.log_softmax(logits, -1), Q.log(), name)
    (P * estimates).sum().backward()
    return logits.grad


def gradient_of(divergence: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """That of a divergence between the whole distributions, on the logits of the policy."""
    logits = P.log().requires_grad_()
    divergence(torch.log_softmax(logits, -1)).backward()
    return logits.grad


@pytest.mark.parametrize("name", ["kl", "k2", "mse", *(f"{name}+" for name in names.KL_PENALTIES)])
def test_kl_k2_and_the_straight_through_forms_have_the_gradient_of_policy_to_reference_on_average(name):
    true = gradient_of(lambda log_p: (log_p.exp() * (log_p - Q.log())).sum())
    assert true.abs().max() > 0.1
    torch.testing.assert_close(mean_gradient(name), true)


def test_other_plain_estimates_have_no_gradient_on_average_or_that_of_another_divergence():
    torch.testing.assert_close(mean_gradient("k1"), torch.zeros(3, dtype=torch.float64))
    reverse = gradient_of(lambda log_p: (Q * (Q.log() - log_p)).sum())
    for name in ("k3", "low_var_kl"):
        torch.testing.assert_close(mean_gradient(name), reverse)
    torch.testing.assert_close(mean_gradient("abs"), gradient_of(lambda log_p: (log_p.exp() - Q).abs().sum()))


@pytest.mark.parametrize("name", names.KL_LOSS_TYPES)
def test_the_gradient_of_each_form_matches_finite_differences(name):
    log_prob = torch.tensor([-0.6, -1.3, -2.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    kl_penalty(log_prob, ref, name).sum().backward()
    form = "k2" if name == "kl" or name.endswith("+") else name
    step = 1e-6
    with torch.no_grad():
        slope = (kl_penalty(log_prob + step, ref, form) - kl_penalty(log_prob - step, ref, form)) / (2 * step)
    torch.testing.assert_close(log_prob.grad, slope, rtol=1e-6, atol=1e-8)


def test_a_token_the_policy_thinks_impossible_stays_finite():
    assert kl_penalty(torch.tensor([-1000.0]), torch.tensor([-0.1]), "low_var_kl").isfinite().all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
def test_kl_loss_ignores_masked_tokens_in_value_and_gradient(garbage):
    log_prob = torch.tensor([[-0.6, garbage], [-0.6, -1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.0, garbage], [-1.0, -1.0]], dtype=torch.float64)
    loss = compute_kl_loss(log_prob, ref, torch.tensor([[1, 0], [1, 1]]), "k3", "token-mean")
    loss.backward()
    assert loss.item() == pytest.approx(2 * BY_HAND["k3"] / 3)
    assert log_prob.grad[0, 1] == 0
    assert log_prob.grad.isfinite().all()


def test_unknown_and_refused_names():
    with pytest.raises(ValueError, match=r"(?s)'full'.*low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")
    with pytest.raises(ValueError, match=r"^kl_penalty: 'k4'.*kl, k1"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("mode", names.LOSS_AGG_MODES)
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3+", "abs"])
def test_kl_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(name, mode):
    rng = torch.Generator().manual_seed(0)
    log_prob, ref = (torch.randn(6, 5, generator=rng, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(6, 5, generator=rng) < 0.6).long()
    mask[:, 0] = 1

    def loss(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        policy = log_prob[rows].clone().requires_grad_()
        share = global_share(mask[rows], mode, mask.sum().item(), 6)
        value = compute_kl_loss(policy, ref[rows], mask[rows], name, mode, loss_scale_factor=7.0) * share
        value.backward()
        return value.detach(), policy.grad

    whole, slopes = loss(slice(0, 6))
    parts = [loss(slice(0, 2)), loss(slice(2, 3)), loss(slice(3, 6))]
    torch.testing.assert_close(sum(value for value, _ in parts), whole)
    torch.testing.assert_close(torch.cat([slope for _, slope in parts]), slopes)


def test_the_kl_over_the_likeliest_tokens_and_the_rest_by_hand():
    """Of three tokens the teacher's likeliest is the first: p = (0.5, 0.5 for the rest), q = (0.2, 0.8)."""
    mine, teachers = P.log()[:1], Q.log()[:1]
    reverse = 0.2 * math.log(0.2 / 0.5) + 0.8 * math.log(0.8 / 0.5)
    forward = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert top_k_kl(mine, teachers, "reverse_kl_topk").item() == pytest.approx(reverse)
    assert top_k_kl(mine, teachers, "forward_kl_topk").item() == pytest.approx(forward)


@pytest.mark.parametrize("kind", names.TOP_K_KLS)
def test_more_tokens_tell_more_of_the_kl_and_all_of_them_the_whole_of_it_with_its_gradient(kind):
    draw = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(5, 12, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    mine, teachers = logits.log_softmax(-1), other.log_softmax(-1)
    order = teachers.argsort(-1, descending=True)
    a, b = (mine, teachers) if kind == "reverse_kl_topk" else (teachers, mine)
    whole = (a.exp() * (a - b)).sum(-1)
    before = torch.zeros(5, dtype=torch.float64)
    for k in range(1, 13):
        found = top_k_kl(mine.gather(1, order[:, :k]), teachers.gather(1, order[:, :k]), kind)
        assert (found >= before - 1e-6).all()
        assert (found <= whole + 1e-6).all()
        before = found.detach()
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (found, whole)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=0)


def test_tokens_that_cannot_occur_cost_what_they_must_and_no_number_is_lost():
    never = torch.tensor([[-0.1, -torch.inf]], requires_grad=True)
    value = top_k_kl(never, torch.tensor([[-0.2, -2.0]]), "reverse_kl_topk")
    value.sum().backward()
    assert value.isfinite().all()
    assert never.grad.isfinite().all()


def test_the_fixed_coefficient_never_moves():
    controller = FixedKLController(0.01)
    controller.update(current_kl=99.0, n_steps=1000)
    assert controller.value == 0.01


def test_the_adaptive_coefficient_by_hand():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.2, horizon=1000)
    controller.update(current_kl=0.22, n_steps=100)
    # error 0.22 / 0.2 - 1 = 0.1; 0.1 · (1 + 0.1 · 100 / 1000)
    assert controller.value == pytest.approx(0.1 * 1.01)
    controller.update(current_kl=2.0, n_steps=100)
    # an error of 9 counts as 0.2
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(current_kl=0.0, n_steps=100)
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create, lambda c: as_config(KLControllerConfig, c)])
def test_the_configuration_chooses(wrap):
    assert isinstance(get_kl_controller(wrap({"type": "fixed", "kl_coef": 0.5})), FixedKLController)
    adaptive = get_kl_controller(wrap({"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.3, "horizon": 50}))
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.5, 0.3, 50)


def test_a_target_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"target_kl=0"):
        AdaptiveKLController(0.1, 0, 10)
