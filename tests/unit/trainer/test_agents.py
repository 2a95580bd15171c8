"""What agents say of their trajectories, and what becomes of it: scores of their own, turns' rewards, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_cases import assert_close, engine_gradients, make_engine
from tests.support.tiny import tiny_model
from verl.config import ActorConfig, AlgorithmConfig, as_config, names
from verl.protocol import DataProto
from verl.trainer.common.training_health import NoSamplesError
from verl.trainer.ppo.advantage import add_advantages, compute_advantage
from verl.trainer.ppo.reward import compute_reward
from verl.trainer.ppo.row_balancing import concat_rows
from verl.trainer.ppo.scoring import require_some_finished, reward_metrics, spread_extra_fields
from verl.types.trajectory import Row, Trajectory, Turn
from verl.workers.engine.base import MicroBatching
from verl.workers.roles.policy_loss import ROW, PolicyLoss
from verl.workers.rollout.training_rows import rows_from_trajectories

PROMPT = [7, 8]


def model(tokens: list[int], **fields: Any) -> Turn:
    return Turn("model", tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", **fields)


def tool(tokens: list[int], **fields: Any) -> Turn:
    return Turn("environment", tokens, **fields)


def trajectory(number: int, *rows: list[Turn], uid: str = "a", status: str = "finished", **fields: Any) -> Trajectory:
    extra = fields.pop("extra", {}) | {"num_turns": 1, "agent_metrics": {"status": status, **fields.pop("said", {})}}
    return Trajectory(uid, number, [Row(PROMPT, row) for row in rows], status, fields.pop("score", None), extra)


def batch_of(*trajectories: Trajectory) -> DataProto:
    rows = rows_from_trajectories(trajectories, pad_token_id=0)
    spread_extra_fields(rows)
    return rows


def algorithm(**given: Any) -> AlgorithmConfig:
    return as_config(AlgorithmConfig, given)


class Manager:
    """Scores an answer by its first token, and remembers what it was asked."""

    on_error = "mask"

    def __call__(self, data: DataProto, return_dict: bool) -> dict[str, Any]:
        self.asked = data.batch["responses"][:, 0].tolist()
        scores = torch.zeros(data.batch["responses"].shape)
        last = (data.batch["response_mask"] * torch.arange(1, scores.shape[1] + 1)).amax(-1) - 1
        scores[torch.arange(len(data)), last] = torch.tensor(self.asked, dtype=torch.float32)
        extra = {"acc": [1.0] * len(data), "scoring_failed": [0.0] * len(data)}
        return {"reward_tensor": scores, "reward_extra_info": extra}


def test_what_brings_its_score_or_failed_is_not_scored_again():
    manager = Manager()
    data = batch_of(
        trajectory(0, [model([50, 51])]),
        trajectory(1, [model([60, 61])], score=0.25, extra={"reward_extra_info": {"acc": 0.5, "hints": 2}}),
        trajectory(2, [model([70, 71])], status="failed"),
    )
    scores, extra = compute_reward(data, manager)
    assert manager.asked == [50]
    assert scores.tolist() == [[0, 50], [0, 0.25], [0, 0]]
    assert extra == {"acc": [1.0, 0.5, None], "hints": [None, 2, None], "scoring_failed": [0.0, 0.0, 0.0]}
    assert reward_metrics(extra)["reward/acc/mean"] == 0.75
    given = batch_of(trajectory(0, [model([50])], score=1.0), trajectory(1, [model([60])], score=0.0))
    assert compute_reward(given, None)[0].sum(-1).tolist() == [1.0, 0.0], "nobody is asked"


@pytest.mark.parametrize("score", [None, 5.0])
def test_the_score_sits_on_the_last_token_that_the_model_sampled_in_whichever_row(score):
    rows = ([model([5, 6]), tool([9])], [tool([9, 9])], [model([])])
    data = batch_of(trajectory(0, *rows, score=score), trajectory(1, [model([50])], [model([51])]))
    scores, _ = compute_reward(data, Manager())
    assert scores.tolist() == [[0, 5, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [51, 0, 0]]


def test_what_turns_earned_is_part_of_the_scores_at_its_place():
    data = batch_of(trajectory(0, [model([5], reward=0.5), tool([9], reward=0.25), model([6, 7], reward=-1.0)]))
    data.batch["token_level_scores"], _ = compute_reward(data, Manager())
    assert data.batch["token_level_scores"].tolist() == [[0.75, 0, 0, 5 - 1.0]]
    add_advantages(data, algorithm(adv_estimator="reinforce_plus_plus", gamma=1.0), None)
    assert data.batch["returns"].tolist() == [[4.75, 0, 4.0, 4.0]]


@pytest.mark.parametrize("name", names.ADV_ESTIMATORS)
def test_a_failed_trajectory_has_no_influence_on_the_others(name):
    """Its group's baseline and the whitening of the batch are as if it had never been."""
    good = [trajectory(number, [model([5, 6])], score=score) for number, score in enumerate((1.0, 0.0, 0.5))]
    failed = trajectory(3, [model([7, 8, 9])], status="failed", score=100.0)
    found = []
    for members in (good, [*good[:1], failed, *good[1:]]):
        data = batch_of(*members)
        scores, _ = compute_reward(data, None)
        data.batch["token_level_scores"] = data.batch["token_level_rewards"] = scores
        data.batch["values"] = torch.ones_like(scores)
        data.batch["reward_baselines"] = torch.ones(len(data))
        compute_advantage(data, name, config=algorithm())
        found.append(data.batch["advantages"])
    assert not found[1][1].any()
    torch.testing.assert_close(found[1][[0, 2, 3], :2], found[0])


def test_where_none_went_through_to_its_end_the_last_failure_is_named():
    said = [{"error": "KeyError: 'city'"}, {"error": "TimeoutError: the user's server"}, {"error": None}]
    broken = [trajectory(i, [model([5])], status="failed", said=each) for i, each in enumerate(said)]
    with pytest.raises(NoSamplesError, match=r" 3 trajectories .* TimeoutError: the user's server"):
        require_some_finished(batch_of(*broken))
    assert require_some_finished(batch_of(*broken, trajectory(9, [model([5])])), failed_before=7) == 0
    # A stream may have asked for the one prompt that is missing, which may always fail.
    assert require_some_finished(batch_of(*broken), failed_before=2, limit=6) == 5
    with pytest.raises(NoSamplesError, match=" 6 trajectories"):
        require_some_finished(batch_of(*broken), failed_before=3, limit=6)
    require_some_finished(DataProto.from_dict({"response_mask": torch.zeros(1, 1)}))


def test_fields_of_agents_are_columns_and_never_in_the_place_of_others():
    one = trajectory(0, [model([5])], extra={"place": "Paris", "uid": "mine", "responses": 3})
    data = batch_of(one, trajectory(1, [model([6])]))
    columns = {name: array.tolist() for name, array in data.non_tensor_batch.items()}
    assert columns["place"] == ["Paris", None]
    assert columns["uid"] == ["a", "a"]
    assert columns["agent_uid"] == ["mine", None]
    assert columns["agent_responses"] == [3, None]
    assert "extra_fields" not in columns
    joined = concat_rows([data, batch_of(trajectory(2, [model([7])]))], 0)
    assert joined.non_tensor_batch["place"].tolist() == ["Paris", None, None]


WORDS = st.lists(st.integers(5, 99), min_size=0, max_size=4)


@pytest.mark.parametrize("name", names.ADV_ESTIMATORS)
@settings(max_examples=8)
@given(st.lists(st.tuples(WORDS, WORDS, st.integers(0, 2)), min_size=4, max_size=4))
def test_tool_output_changes_no_model_tokens_advantage(name, drawn):
    """Whatever tools say, however long: what a model's token learns is by the model's tokens and rewards alone."""

    def advantages(texts: list[list[int]]) -> tuple[list[float], list[float]]:
        members = [
            trajectory(number, [model([5], reward=0.5), tool(text), model([6, 7])], uid=f"p{number % 2}", score=score)
            for number, (text, (_, _, score)) in enumerate(zip(texts, drawn, strict=True))
        ]
        data = batch_of(*members)
        data.batch["token_level_scores"], _ = compute_reward(data, None)
        mask = data.batch["response_mask"].bool()
        data.batch["values"] = torch.full(mask.shape, 99.0)
        data.batch["values"][mask] = torch.arange(1.0, 1.0 + int(mask.sum())) / 10
        data.batch["reward_baselines"] = torch.ones(len(data))
        add_advantages(data, algorithm(adv_estimator=name, gamma=0.9, lam=0.8), None)
        assert not data.batch["advantages"][~mask].any()
        return data.batch["advantages"][mask].tolist(), data.batch["returns"][mask].tolist()

    assert advantages([first for first, _, _ in drawn]) == advantages([second for _, second, _ in drawn])


def test_a_two_turn_trajectory_gives_the_gradient_of_the_plain_formula():
    """-Σ A log π over the model's tokens, each after all that was said before it, by transformers alone."""
    members = [
        trajectory(0, [model([20, 21]), tool([90, 91, 92]), model([22, 1])], score=1.0),
        trajectory(1, [model([30]), tool([93]), model([31, 32, 1])], score=0.0),
        trajectory(2, [model([40])], [model([41, 1])], score=1.0),
        trajectory(3, [model([50, 51])], status="failed"),
    ]
    data = batch_of(*members)
    data.batch["token_level_scores"], _ = compute_reward(data, None)
    add_advantages(data, algorithm(adv_estimator="grpo", norm_adv_by_std_in_grpo=False), None)
    config = as_config(ActorConfig, {"loss_agg_mode": "token-mean"})
    plain = tiny_model()
    total, advantage = torch.zeros(()), {0: 1 / 3, 1: -2 / 3, 2: 1 / 3}
    for number, member in enumerate(members[:3]):
        for row in member.rows:
            ids, by_model = list(row.prompt_ids), [False] * len(row.prompt_ids)
            for turn in row.turns:
                ids += turn.token_ids
                by_model += [turn.source == "model"] * len(turn.token_ids)
            log_probs = torch.log_softmax(plain(input_ids=torch.tensor([ids])).logits[0], dim=-1)
            picked = [log_probs[place - 1, ids[place]] for place in range(len(ids)) if by_model[place]]
            total = total - advantage[number] * torch.stack(picked).sum() / 11
    total.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    engine = make_engine(tiny_model())
    loss = PolicyLoss(config, own_old_log_probs=True)
    data.batch[ROW] = torch.arange(len(data))
    engine.forward_backward(data, loss, loss.outputs, micro=MicroBatching(size=2))
    assert_close(engine_gradients(engine), wanted)
