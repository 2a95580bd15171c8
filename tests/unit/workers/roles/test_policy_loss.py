"""PPO by hand on a model of two tokens, and what the actor's loss does with counts, KL and entropy."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algos.registry import POLICY_LOSSES
from verl.config import ActorConfig, RolloutCorrectionConfig, as_config
from verl.config.ppo import DistillationLossConfig
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import RolloutMismatch
from verl.workers.engine.base import Counts
from verl.workers.roles.policy_loss import ROW, PolicyLoss


def loss_of(theta: torch.Tensor, token: int, advantage: float, old: float, **config) -> torch.Tensor:
    log_probs = theta.log_softmax(0)[token].view(1, 1)
    data = DataProto.from_dict(
        {
            "old_log_probs": torch.tensor([[old]]),
            "advantages": torch.tensor([[advantage]]),
            "response_mask": torch.ones(1, 1),
            "ref_log_prob": torch.tensor([[math.log(0.5)]]),
        }
    )
    entropy = -(theta.softmax(0) * theta.log_softmax(0)).sum().view(1, 1)
    loss = PolicyLoss(as_config(ActorConfig, config))
    return loss({"log_probs": log_probs, "entropy": entropy}, data, Counts(tokens=1, sequences=1))[0]


def test_a_ppo_step_by_hand_on_a_model_of_two_tokens():
    """Logits θ = (0, 0), so p = (1/2, 1/2). Token 1 was sampled, its advantage is +1.

    First pass: ratio 1, loss -1. dloss/dθ = -A · ratio · (onehot - p) = -(0 - 1/2, 1 - 1/2) = (+1/2, -1/2).
    A step of size 1: θ = (-1/2, +1/2), p₁ = 1 / (1 + e⁻¹) = 0.7311, ratio = 0.7311 / 0.5 = 1.4621.
    Second pass: 1.4621 > 1 + 0.2, so the loss is -1.2 and its gradient 0.
    """
    theta = torch.zeros(2, requires_grad=True)
    old = math.log(0.5)
    loss = loss_of(theta, token=1, advantage=1.0, old=old, clip_ratio=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert theta.grad.tolist() == pytest.approx([0.5, -0.5])
    theta = (theta - theta.grad).detach().requires_grad_()
    assert theta.softmax(0)[1].item() == pytest.approx(1 / (1 + math.exp(-1)))
    second = loss_of(theta, token=1, advantage=1.0, old=old, clip_ratio=0.2)
    second.backward()
    assert second.item() == pytest.approx(-1.2)
    assert theta.grad.tolist() == [0.0, 0.0]


def test_kl_and_entropy_enter_with_their_coefficients():
    """p₁ = e^0.4 / (1 + e^0.4); k1 = log p₁ - log 1/2; entropy H(p)."""
    theta = torch.tensor([0.0, 0.4], requires_grad=True)
    p = math.exp(0.4) / (1 + math.exp(0.4))
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    base = loss_of(theta, 1, 1.0, math.log(p)).item()
    with_kl = loss_of(theta, 1, 1.0, math.log(p), use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="kl").item()
    with_entropy = loss_of(theta, 1, 1.0, math.log(p), entropy_coeff=0.01).item()
    assert base == pytest.approx(-1.0)
    assert with_kl - base == pytest.approx(0.1 * (math.log(p) - math.log(0.5)), abs=1e-6)
    assert with_entropy - base == pytest.approx(-0.01 * entropy, abs=1e-6)


def test_the_kl_loss_as_it_is_by_default_pulls_the_policy_to_the_reference():
    """Exactly: each of the two tokens with its probability. The true gradient is p₀ p₁ (θ₁ - θ₀) (-1, 1) for a
    reference of (1/2, 1/2)."""
    theta = torch.tensor([0.0, 0.4], requires_grad=True)
    probabilities = theta.detach().softmax(0)
    with_kl = {"use_kl_loss": True, "kl_loss_coef": 1.0}
    for token, p in enumerate(probabilities.tolist()):
        (p * loss_of(theta, token, advantage=0.0, old=math.log(p), **with_kl)).backward()
    pull = 0.4 * math.prod(probabilities.tolist())
    assert theta.grad.tolist() == pytest.approx([-pull, pull])


def test_parts_of_a_step_add_up_to_the_whole():
    """Cut into single rows, the losses with global counts sum to the loss of all rows."""
    torch.manual_seed(0)
    rows, width = 6, 5
    mask = (torch.arange(width) < torch.tensor([5, 3, 1, 4, 2, 5])[:, None]).float()
    data = DataProto.from_dict(
        {"old_log_probs": torch.randn(rows, width), "advantages": torch.randn(rows, width), "response_mask": mask}
    )
    log_probs = torch.randn(rows, width)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        loss = PolicyLoss(as_config(ActorConfig, {"loss_agg_mode": mode}))
        counts = Counts(tokens=float(mask.sum()), sequences=float(rows))
        whole = loss({"log_probs": log_probs}, data, counts)[0]
        parts = [loss({"log_probs": log_probs[i : i + 1]}, data[i : i + 1], counts)[0] for i in range(rows)]
        assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
def test_taking_its_own_log_probs_as_the_old_ones_is_the_same_as_being_given_them(mode):
    """Loss, gradient and metrics of a step whose ratio is 1, bit for bit; the log-probs come back by row."""
    torch.manual_seed(1)
    rows, width = 6, 5
    mask = (torch.arange(width) < torch.tensor([5, 3, 1, 4, 2, 5])[:, None]).float()
    columns = {"advantages": torch.randn(rows, width), "response_mask": mask, "ref_log_prob": torch.randn(rows, width)}
    logits = torch.randn(rows, width)
    config = as_config(ActorConfig, {"policy_loss": {"loss_mode": mode}, "use_kl_loss": True, "entropy_coeff": 0.01})
    counts = Counts(tokens=float(mask.sum()), sequences=float(rows))
    order = [torch.tensor([4, 0, 2]), torch.tensor([5, 1, 3])]
    found = {}
    for own in (False, True):
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = torch.nn.functional.logsigmoid(leaf), leaf**2
        given = {ROW: torch.arange(rows)} if own else {"old_log_probs": log_probs.detach()}
        data = DataProto.from_dict({**columns, **given})
        loss = PolicyLoss(config, own_old_log_probs=own)
        parts = [
            loss({"log_probs": log_probs[part], "entropy": entropy[part]}, data.select_idxs(part), counts)
            for part in order
        ]
        sum(part[0] for part in parts).backward()
        found[own] = leaf.grad, [part[1] for part in parts]
    assert torch.equal(found[True][0], found[False][0])
    for with_own, plain in zip(found[True][1], found[False][1], strict=True):
        measured = with_own.pop("entropy")
        assert with_own == plain
        assert measured[1] > 0
    assert torch.equal(loss.old_log_probs(rows), log_probs.detach())


def test_the_entropy_is_asked_for_only_where_it_is_used():
    config = as_config(ActorConfig, {})
    assert PolicyLoss(config).outputs == ("log_probs",)
    assert PolicyLoss(config, own_old_log_probs=True).outputs == ("log_probs", "entropy_value")
    both = PolicyLoss(as_config(ActorConfig, {"entropy_coeff": 0.1}), own_old_log_probs=True)
    assert both.outputs == ("log_probs", "entropy")
    assert PolicyLoss(as_config(ActorConfig, {"entropy_coeff": 0.1})).outputs == ("log_probs", "entropy")


def test_the_kl_to_the_teacher_by_hand_with_and_without_task_rewards():
    """Logits θ = (0, log 3): p₁ = 3/4; the teacher gives token 1 the probability 1/2. d = log 3/2 = 0.4055.

    k3+: value e⁻ᵈ - 1 + d = 2/3 - 1 + 0.4055 = 0.0721, gradient that of d²/2: d (onehot - p) = d (-1/4, +1/4).
    With task rewards and coefficient 2: the policy's -A (onehot - p) comes on top, at ratio 1.
    """
    d = math.log(1.5)
    for task, value, slope in ((False, 2 * (2 / 3 - 1 + d), 2 * d), (True, 2 * (2 / 3 - 1 + d) - 3.0, 2 * d - 3.0)):
        theta = torch.tensor([0.0, math.log(3.0)], requires_grad=True)
        log_prob = theta.log_softmax(0)[1].view(1, 1)
        data = DataProto.from_dict(
            {
                "old_log_probs": log_prob.detach(),
                "advantages": torch.full((1, 1), 3.0),
                "response_mask": torch.ones(1, 1),
                "teacher_log_prob": torch.full((1, 1), math.log(0.5)),
            }
        )
        asked = DistillationLossConfig(
            loss_mode="k3+", topk=1, distillation_loss_coef=2.0, use_task_rewards=task, as_reward=False
        )
        loss = PolicyLoss(as_config(ActorConfig, {}), distillation=asked)
        found, metrics = loss({"log_probs": log_prob}, data, Counts(tokens=1, sequences=1))
        found.backward()
        assert found.item() == pytest.approx(value, abs=1e-6)
        assert theta.grad.tolist() == pytest.approx([-slope / 4, slope / 4], abs=1e-6)
        assert metrics["teacher_kl"][0].item() == pytest.approx(d)
        assert ("policy_loss" in metrics) == task


def test_the_teachers_loss_does_not_depend_on_how_rows_are_cut():
    torch.manual_seed(0)
    columns = {name: torch.randn(6, 5) for name in ("log_probs", "teacher_log_prob")}
    mask = (torch.arange(5) < torch.tensor([5, 1, 3, 4, 2, 5])[:, None]).long()
    asked = DistillationLossConfig(
        loss_mode="k3+", topk=1, distillation_loss_coef=1.0, use_task_rewards=False, as_reward=False
    )
    loss = PolicyLoss(as_config(ActorConfig, {}), distillation=asked)
    found = []
    for parts in (1, 3):
        log_probs, total = columns["log_probs"].clone().requires_grad_(), torch.zeros(())
        for rows in torch.arange(6).chunk(parts):
            data = {"response_mask": mask[rows], "old_log_probs": columns["log_probs"][rows]}
            data |= {"teacher_log_prob": columns["teacher_log_prob"][rows]}
            counts = Counts(tokens=float(mask.sum()), sequences=6)
            total = total + loss({"log_probs": log_probs[rows]}, DataProto.from_dict(data), counts)[0]
        total.backward()
        found.append((total.detach(), log_probs.grad))
    torch.testing.assert_close(found[0], found[1])
    assert not found[0][1][mask == 0].any()


def reinforce(rows: slice, counts: Counts, **correction) -> tuple[float, list]:
    """Loss and gradient of these of three rows, whose ratios to the rollout are 4, 1/2; 1/2, 1/2; 2."""
    old = torch.tensor([[-2.0, -1.0], [-1.0, -3.0], [-2.0, 0.0]])
    ratios = torch.tensor([[4.0, 0.5], [0.5, 0.5], [2.0, 1.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    log_probs = (old + ratios.log())[rows].requires_grad_()
    data = DataProto.from_dict(
        {
            "old_log_probs": old[rows],
            "advantages": torch.tensor([[1.0, 1.0], [-2.0, -2.0], [3.0, 3.0]])[rows],
            "response_mask": mask[rows],
        }
    )
    asked = {"bypass_mode": True, "loss_type": "reinforce"} | correction
    loss = PolicyLoss(
        as_config(ActorConfig, {"policy_loss": {"loss_mode": "gpg"}}),
        correction=as_config(RolloutCorrectionConfig, asked),
    )
    value, _ = loss({"log_probs": log_probs}, data, counts)
    value.backward()
    return value.item(), log_probs.grad.tolist()


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({}, [[2.0, 0.5], [0.5, 0.5], [2.0, 0.0]]),
        ({"rollout_is_threshold": "0.4_3.0"}, [[0.0, 0.5], [0.5, 0.5], [2.0, 0.0]]),
        ({"rollout_is": "sequence", "rollout_is_threshold": 9.0}, [[2.0, 2.0], [0.25, 0.25], [2.0, 0.0]]),
        ({"rollout_is": None}, [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]),
    ],
)
def test_reinforce_weighs_by_the_policy_of_the_update_itself(correction, weights):
    """d loss / d log π = -w · A / tokens, w the ratio to the rollout, of which no gradient is taken."""
    everything = reinforce(slice(None), Counts(tokens=5, sequences=3), **correction)
    advantages = (1.0, -2.0, 3.0)
    expected = [[-w * advantage / 5 for w in row] for row, advantage in zip(weights, advantages, strict=True)]
    assert everything[1] == [pytest.approx(row) for row in expected]
    parts = [reinforce(slice(row, row + 1), Counts(tokens=5, sequences=3), **correction) for row in range(3)]
    assert sum(loss for loss, _ in parts) == pytest.approx(everything[0]), "micro-batches make no difference"
    assert [row for _, rows in parts for row in rows] == everything[1]


def stale_batch() -> DataProto:
    """Three responses; the rollout's log-prob of one token is unknown, and sampling was truncated."""
    generator = torch.Generator().manual_seed(3)
    full = -torch.rand(3, 4, generator=generator) * 3
    full[1, 2] = math.nan
    tensors = {
        "rollout_log_probs": full,
        "rollout_drawn_log_probs": full * 0.7,
        "advantages": torch.randn(3, 4, generator=generator),
        "response_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]),
        ROW: torch.arange(3),
    }
    return DataProto.from_dict(tensors)


def loss_and_gradient(mode: str, data: DataProto, log_probs: torch.Tensor, correction, own: bool) -> tuple:
    loss_fn = PolicyLoss(as_config(ActorConfig, {"policy_loss": {"loss_mode": mode}}), own, correction=correction)
    values, gradients = [], []
    for rows in (slice(0, 2), slice(2, 3)):  # two micro-batches
        leaf = log_probs[rows].clone().requires_grad_()
        output = {"log_probs": leaf, "entropy_value": torch.zeros_like(leaf)}
        loss, _ = loss_fn(output, data[rows], Counts(tokens=8, sequences=3))
        loss.backward()
        values.append(loss.detach())
        gradients.append(leaf.grad)
    return torch.stack(values), torch.cat(gradients)


@pytest.mark.parametrize("denominator", ["full", "drawn"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
def test_weights_of_stale_tokens_are_the_same_from_the_update_as_from_a_separate_pass(mode, level, denominator):
    settings = {"rollout_is": level, "rollout_is_threshold": 1.5, "denominator": denominator}
    correction = as_config(RolloutCorrectionConfig, settings)
    log_probs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(4)) * 3
    separate, own = stale_batch(), stale_batch()
    separate.batch["old_log_probs"] = log_probs
    RolloutMismatch(correction).correct(separate, separate.select())
    assert separate.batch["rollout_is_weights"].unique().numel() > 2, "otherwise nothing is weighted"
    RolloutMismatch(correction).add_denominator(own, own.select())
    expected = loss_and_gradient(mode, separate, log_probs, None, own=False)
    torch.testing.assert_close(loss_and_gradient(mode, own, log_probs, correction, own=True), expected)
    del own.batch["denominator_log_probs"]
    unweighted = loss_and_gradient(mode, own, log_probs, None, own=True)
    assert not torch.allclose(unweighted[1], expected[1])
