"""The critic's loss on one micro-batch: the same rows give the same loss, however they are padded and cut."""

from __future__ import annotations

import pytest
import torch

from verl.config import CriticConfig, as_config, load_config, names
from verl.protocol import DataProto
from verl.workers.engine.base import Counts
from verl.workers.roles.critic import ValueLoss

LENGTHS = torch.tensor([4, 1, 3])
GIVEN = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=1"]


def outcome(mode: str, width: int, cuts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of three rows, padded to `width` and cut into these micro-batches."""
    torch.manual_seed(0)
    filled = {name: torch.zeros(3, width) for name in ("values", "returns")}
    for column in filled.values():
        column[:, :4] = torch.randn(3, 4)
    predicted = torch.zeros(3, width)
    predicted[:, :4] = torch.randn(3, 4)
    predicted.requires_grad_()
    mask = (torch.arange(width) < LENGTHS[:, None]).long()
    data = DataProto.from_dict({**filled, "response_mask": mask})
    loss = ValueLoss(as_config(CriticConfig, {"loss_agg_mode": mode}))
    counts = Counts(tokens=float(LENGTHS.sum()), sequences=3.0)
    total = sum(loss({"values": predicted[rows]}, data.select_idxs(torch.tensor(rows)), counts)[0] for rows in cuts)
    total.backward()
    return total.item(), predicted.grad[:, :4]


@pytest.mark.parametrize("mode", names.LOSS_AGG_MODES)
def test_loss_and_gradient_depend_neither_on_the_padded_width_nor_on_the_cut(mode):
    value, slopes = outcome(mode, 4, [[0, 1, 2]])
    for width, cuts in ((4, [[0], [1, 2]]), (9, [[0, 1, 2]]), (300, [[2, 0], [1]])):
        other, other_slopes = outcome(mode, width, cuts)
        assert other == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(other_slopes, slopes)


def test_the_divisor_is_the_actors_unless_the_critic_has_its_own():
    def factor(*overrides: str) -> float:
        return load_config(None, [*GIVEN, *overrides], check_files=False).critic.loss_scale_factor

    assert factor("data.max_response_length=300") == 300
    assert factor("actor_rollout_ref.actor.loss_scale_factor=100") == 100
    assert factor("actor_rollout_ref.actor.loss_scale_factor=100", "critic.loss_scale_factor=7") == 7
    sums = {mode: outcome(mode, 9, [[0, 1, 2]])[0] for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm")}
    assert sums["seq-mean-token-sum-norm"] == pytest.approx(sums["seq-mean-token-sum"] / 512)
