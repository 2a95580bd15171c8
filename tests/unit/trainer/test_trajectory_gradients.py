"""Gradients of trajectories with 1 to 3 rows in uneven groups, on 1 and 2 ranks, against the formula written out.

The policy and the critic are tables with one number per token, so each token's gradient is seen by itself. What is in
between is real: joining, estimators, mini-batches, fillers, micro-batches, counts and losses.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from verl.algos.masked_ops import LOSS_AGG_MODES
from verl.config import ActorConfig, CriticConfig, as_config
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.advantage import compute_advantage
from verl.trainer.ppo.row_balancing import balance_rows, mini_batches_by_prompt, row_costs
from verl.utils.balancing import COST_PER_TOKEN
from verl.workers.engine.base import Counts, MicroBatching
from verl.workers.engine.common.micro_batches import local_counts, micro_batches
from verl.workers.roles.critic import ValueLoss
from verl.workers.roles.policy_loss import PolicyLoss

GAMMA, LAM, SCALE, KL_COEF = 0.9, 0.8, 7.0, 0.1
ANSWERS = {"a": 3, "b": 1, "c": 4, "d": 2, "e": 3}  # per prompt
PROMPTS_PER_MINI_BATCH = 2


@dataclass
class Answer:
    """A trajectory: the numbers of its model's tokens, row by row, with None where the environment wrote."""

    uid: str
    rows: list[list[int | None]]
    score: float

    @property
    def tokens(self) -> list[int]:
        return [token for row in self.rows for token in row if token is not None]


def answers() -> list[Answer]:
    draw, count, found = random.Random(7), iter(range(10_000)), []
    for uid, number in ANSWERS.items():
        for _ in range(number):
            rows: list[list[int | None]] = []
            for _ in range(draw.randint(1, 3)):
                rows.append([next(count) for _ in range(draw.randint(1, 4))])
                if draw.random() < 0.5:  # a tool's answer, and another turn
                    rows[-1] += [None, None, next(count)]
            found.append(Answer(uid, rows, float(draw.randint(0, 1))))
    assert {len(answer.rows) for answer in found} == {1, 2, 3}
    return found


ALL = answers()
COUNT = sum(len(answer.tokens) for answer in ALL)
TABLE = torch.Generator().manual_seed(0)
OLD, REFERENCE, BEFORE = (torch.randn(COUNT, generator=TABLE, dtype=torch.float64) for _ in range(3))
NOW = OLD + 0.1 * torch.rand(COUNT, generator=TABLE, dtype=torch.float64)  # ratios within the clip range
VALUE_NOW = BEFORE + 0.1 * torch.rand(COUNT, generator=TABLE, dtype=torch.float64)


def batch_of_rows() -> DataProto:
    """The rows as a rollout gives them, each with the old numbers of its tokens and the score on the last row."""
    rows = [(answer, place, row) for answer in ALL for place, row in enumerate(answer.rows)]
    width = max(len(row) for _, _, row in rows) + 1
    token = torch.zeros(len(rows), width, dtype=torch.long)
    mask, scores = torch.zeros_like(token), torch.zeros(len(rows), width, dtype=torch.float64)
    for number, (answer, place, row) in enumerate(rows):
        for column, index in enumerate(row):
            if index is not None:
                token[number, column], mask[number, column] = index, 1
        if place == len(answer.rows) - 1:
            scores[number, len(row) - 1] = answer.score
    attention = torch.cat([torch.ones_like(mask[:, :2]), mask], dim=1)
    tensors = {
        "token": token,
        "responses": token,
        "response_mask": mask,
        "attention_mask": attention,
        "token_level_rewards": scores,
        "old_log_probs": OLD[token],
        "ref_log_prob": REFERENCE[token],
        "values": BEFORE[token],
    }
    number_of = {id(answer): number for number, answer in enumerate(ALL)}
    objects = {
        "uid": object_array([answer.uid for answer, _, _ in rows]),
        "trajectory": object_array([f"{answer.uid}/{number_of[id(answer)]}" for answer, _, _ in rows]),
    }
    return DataProto.from_dict(tensors, objects)


def gradients(estimator: str, loss: Any, output: str, numbers: torch.Tensor, ranks: int, balance: bool) -> torch.Tensor:
    """The gradient of every mini-batch by every token's number: [mini-batches, tokens]."""
    batch = compute_advantage(batch_of_rows(), estimator, gamma=GAMMA, lam=LAM)
    minis = mini_batches_by_prompt(batch.non_tensor_batch["uid"], PROMPTS_PER_MINI_BATCH)
    balanced = balance_rows(row_costs(batch), minis, ranks, balance)
    assert balanced.filler.any() == (ranks > 1), "the case must have fillers"
    shards = balanced.take(batch, list(batch.batch.keys())).chunk(ranks)
    found = []
    for start, size in zip(np.cumsum([0, *balanced.sizes[:-1]]), balanced.sizes, strict=True):
        parts = [shard[int(start) : int(start) + size] for shard in shards]
        own = [local_counts(part) for part in parts]
        counts = Counts(sum(each.tokens for each in own), sum(each.sequences for each in own))
        table = numbers.clone().requires_grad_()
        for part in parts:
            for micro, _ in micro_batches(part, MicroBatching(size=2), COST_PER_TOKEN, lambda count: count):
                loss({output: table[micro.batch["token"]]}, micro, counts)[0].backward()
        found.append(table.grad)
    return torch.stack(found)


def weights(mode: str, members: list[Answer]) -> dict[int, float]:
    """What each token's loss is multiplied with in a mini-batch of these trajectories."""
    tokens, trajectories = sum(len(answer.tokens) for answer in members), len(members)
    by_mode = {
        "token-mean": lambda answer: 1 / tokens,
        "token-sum": lambda answer: 1.0,
        "seq-mean-token-sum": lambda answer: 1 / trajectories,
        "seq-mean-token-mean": lambda answer: 1 / trajectories / len(answer.tokens),
        "seq-mean-token-sum-norm": lambda answer: 1 / trajectories / SCALE,
    }
    return {token: by_mode[mode](answer) for answer in members for token in answer.tokens}


def grpo() -> tuple[list[float], list[float]]:
    """Advantages per token, and returns, which nobody reads."""
    per_token = [0.0] * COUNT
    for uid in ANSWERS:
        group = [answer for answer in ALL if answer.uid == uid]
        scores = [answer.score for answer in group]
        mean = sum(scores) / len(scores)
        std = math.sqrt(sum((s - mean) ** 2 for s in scores) / max(1, len(scores) - 1))
        for answer in group:
            for token in answer.tokens:
                per_token[token] = (answer.score - mean) / (std + 1e-6)
    return per_token, per_token


def gae() -> tuple[list[float], list[float]]:
    """Over whole trajectories: the token after a row's last one is the next row's first."""
    plain, returns = [0.0] * COUNT, [0.0] * COUNT
    for answer in ALL:
        after, next_value = 0.0, 0.0
        for place, token in reversed(list(enumerate(answer.tokens))):
            reward = answer.score if place == len(answer.tokens) - 1 else 0.0
            after = reward + GAMMA * next_value - float(BEFORE[token]) + GAMMA * LAM * after
            next_value = float(BEFORE[token])
            plain[token], returns[token] = after, after + next_value
    mean = sum(plain) / COUNT
    std = math.sqrt(sum((value - mean) ** 2 for value in plain) / (COUNT - 1) + 1e-8)
    return [(value - mean) / std for value in plain], returns


def mini_batches() -> list[list[Answer]]:
    uids = list(ANSWERS)
    runs = [uids[at : at + PROMPTS_PER_MINI_BATCH] for at in range(0, len(uids), PROMPTS_PER_MINI_BATCH)]
    return [[answer for answer in ALL if answer.uid in run] for run in runs]


@pytest.mark.parametrize(("ranks", "balance"), [(1, True), (2, False), (2, True)])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_policys_gradient_is_the_formulas(estimator, mode, ranks, balance):
    """-A ratio, and the KL's log π - log π_ref, each token weighed as its trajectory and mini-batch say."""
    given = {"use_kl_loss": True, "kl_loss_type": "mse", "kl_loss_coef": KL_COEF, "loss_scale_factor": SCALE}
    loss = PolicyLoss(as_config(ActorConfig, given | {"loss_agg_mode": mode}))
    found = gradients(estimator, loss, "log_probs", NOW, ranks, balance)
    advantages, _ = {"grpo": grpo, "gae": gae}[estimator]()
    expected = torch.zeros_like(found)
    for mini, members in enumerate(mini_batches()):
        for token, weight in weights(mode, members).items():
            ratio = math.exp(float(NOW[token] - OLD[token]))
            kl = KL_COEF * float(NOW[token] - REFERENCE[token])
            expected[mini, token] = weight * (-advantages[token] * ratio + kl)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_critics_gradient_is_the_formulas(mode, ranks):
    loss = ValueLoss(as_config(CriticConfig, {"loss_agg_mode": mode, "loss_scale_factor": SCALE}))
    found = gradients("gae", loss, "values", VALUE_NOW, ranks, balance=True)
    _, returns = gae()
    expected = torch.zeros_like(found)
    for mini, members in enumerate(mini_batches()):
        for token, weight in weights(mode, members).items():
            expected[mini, token] = weight * (float(VALUE_NOW[token]) - returns[token])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
