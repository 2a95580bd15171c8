"""Rewards of a run: the manager and function its configuration names, checked before training, masked on failure."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.support.tiny import tiny_tokenizer
from verl import DataProto
from verl.config import load_config
from verl.config.names import REWARD_MANAGERS
from verl.protocol import object_array
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.reward import (
    check_rewards,
    compute_reward,
    get_custom_reward_fn,
    load_reward_manager,
)
from verl.trainer.ppo.scoring import reward_metrics
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score.calls import ERROR_KINDS
from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls

TOKENIZER = tiny_tokenizer()
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0):
    if solution_str == "boom":
        raise RuntimeError("boom")
    return 1.0 if solution_str == ground_truth else format_score

def short(solution_str, ground_truth):
    return 0.5

def wrong(text):
    return 1.0

def lists(solution_strs, ground_truths, bonus=0.0):
    return [(text == truth) + bonus for text, truth in zip(solution_strs, ground_truths)]

def known_names(solution_str, ground_truth):
    return {"score": 1.0, "data_source": "another", "uid": 7, "responses": 0}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my_reward.py").write_text(FUNCTION)
    return str(tmp_path / "my_reward.py")


def batch(texts, truth="yes") -> DataProto:
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts]
    mask = torch.tensor([[1] * len(row) + [0] * (8 - len(row)) for row in ids])
    tensors = {
        "responses": torch.tensor([row + [0] * (8 - len(row)) for row in ids]),
        "attention_mask": mask,
        "response_mask": mask.clone(),
    }
    rows = {
        "data_source": ["mine"] * len(texts),
        "reward_model": [{"style": "rule", "ground_truth": truth}] * len(texts),
    }
    return DataProto.from_dict(tensors, rows)


def test_without_a_path_there_is_no_custom_function():
    assert get_custom_reward_fn({}) is None
    assert get_custom_reward_fn(OmegaConf.create({"custom_reward_function": {"path": None}})) is None


def test_a_custom_function_scores_with_its_arguments_in_scorer_processes(file):
    config = {"custom_reward_function": {"path": file, "reward_kwargs": {"format_score": 0.1}}}
    manager = load_reward_manager(OmegaConf.create(config), TOKENIZER, num_examine=0, num_processes=1)
    try:
        scores, extra = compute_reward(batch(["yes", "no"]), manager)
    finally:
        manager.close()
    assert scores.sum(-1).tolist() == pytest.approx([1.0, 0.1])
    assert extra == {"scoring_failed": [0.0, 0.0], "scoring_error": [None, None]}


def test_a_function_may_leave_out_what_it_does_not_need(file):
    config = {"custom_reward_function": {"path": file, "name": "short"}, "reward_model": {"on_error": "fail"}}
    manager = load_reward_manager(config, TOKENIZER, 0, num_processes=0)
    assert compute_reward(batch(["x"]), manager)[0].sum() == 0.5


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"name": "wrong"}, r"^custom_reward_function\.path: wrong\(text\).* solution_str, ground_truth\b"),
        ({"name": "nothing"}, r"^custom_reward_function\.path: .*'nothing'.*compute_score"),
        ({"reward_kwargs": {"bonus": 1}}, r"^custom_reward_function\.reward_kwargs: .* bonus\."),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_loaded(file, block, expected):
    with pytest.raises(ValueError, match=expected):
        get_custom_reward_fn({"custom_reward_function": {"path": file, **block}})


def test_the_manager_gets_what_the_configuration_says():
    config = {
        "reward_model": {"on_error": "zero", "reward_kwargs": {"timeout": 3.0}},
        "data": {"reward_fn_key": "task"},
    }
    manager = load_reward_manager(config, TOKENIZER, 2)
    assert isinstance(manager, NaiveRewardManager)
    assert (manager.on_error, manager.reward_fn_key, manager.num_examine) == ("zero", "task", 2)
    with pytest.raises(ValueError, match=r"reward_model\.reward_kwargs"):
        load_reward_manager({"reward_model": {"reward_kwargs": {"timout": 3.0}}}, TOKENIZER, 0)


def test_every_manager_that_the_configuration_knows_is_there():
    for name in REWARD_MANAGERS:
        manager = load_reward_manager({"reward_model": {"reward_manager": name, "on_error": "zero"}}, TOKENIZER, 0)
        assert type(manager) is get_reward_manager_cls(name)
        assert manager.on_error == "zero"


def test_the_dapo_manager_gets_the_overlong_buffer_and_the_longest_response():
    config = {
        "reward_model": {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 4, "log": True}},
        "data": {"max_response_length": 4},
    }
    manager = load_reward_manager(config, TOKENIZER, 0, num_processes=0)
    assert (manager.max_resp_len, manager.overlong_buffer.len, manager.overlong_buffer.penalty_factor) == (4, 4, 1.0)


def test_arguments_that_a_manager_hands_on_are_known_and_others_refused():
    block = {"reward_manager": "prime", "reward_kwargs": {"num_processes": 0, "memory_limit_gb": 2.0}}
    assert load_reward_manager({"reward_model": block}, TOKENIZER, 0)
    block["reward_kwargs"]["memory"] = 1
    with pytest.raises(ValueError, match=r"num_processes"):
        load_reward_manager({"reward_model": block}, TOKENIZER, 0)


def test_the_batch_manager_wants_a_function_of_lists(file):
    config = {
        "custom_reward_function": {"path": file, "name": "lists", "reward_kwargs": {"bonus": 0.5}},
        "reward_model": {"reward_manager": "batch"},
    }
    manager = load_reward_manager(config, TOKENIZER, 0, num_processes=0)
    assert compute_reward(batch(["yes", "no"]), manager)[0].sum(-1).tolist() == [1.5, 0.5]
    config["custom_reward_function"] = {"path": file, "name": "short"}
    with pytest.raises(ValueError, match=r"(?s)solution_str.*ground_truth.*solution_strs"):
        load_reward_manager(config, TOKENIZER, 0)


def test_names_that_the_batch_has_are_not_written_over(file):
    config = {"custom_reward_function": {"path": file, "name": "known_names"}}
    data = batch(["yes"])
    _, extra = compute_reward(data, load_reward_manager(config, TOKENIZER, 0, num_processes=0))
    assert extra["reward_data_source"] == ["another"]
    assert extra["reward_responses"] == [0]
    assert extra["uid"] == [7]
    assert not extra.keys() & {*data.batch.keys(), *data.non_tensor_batch}


def test_metrics_are_means_of_what_is_a_number_and_counts_of_errors_by_kind():
    extra = {
        "acc": [1.0, None, np.float32(0.5), math.nan],
        "pred": ["72", None, "7", "8"],
        "scoring_failed": [0.0, 1.0, 1.0, 1.0],
        "scoring_error": [None, "timeout", "died", "timeout"],
    }
    assert reward_metrics(extra) == {
        "reward/acc/mean": 0.75,
        "reward/scoring_failed/mean": 0.75,
        "reward/errors": 3.0,
        "reward/errors/raised": 0.0,
        "reward/errors/invalid": 0.0,
        "reward/errors/memory": 0.0,
        "reward/errors/timeout": 2.0,
        "reward/errors/died": 1.0,
    }
    healthy = {name: value for name, value in reward_metrics({"scoring_error": [None]}).items() if "errors" in name}
    assert healthy == dict.fromkeys(["reward/errors", *(f"reward/errors/{kind}" for kind in ERROR_KINDS)], 0.0)
    assert reward_metrics({}) == {}


def test_a_masked_sample_counts_for_nothing_in_its_group(file):
    config = {"custom_reward_function": {"path": file}, "reward_model": {"on_error": "mask"}}
    manager = load_reward_manager(config, TOKENIZER, 0, num_processes=0)

    def advantages(texts):
        data = batch(texts)
        scores, _ = compute_reward(data, manager)
        return compute_grpo_outcome_advantage(scores, data.batch["response_mask"], ["one"] * len(texts))[0]

    with_failure, without = advantages(["yes", "boom", "no", "yes"]), advantages(["yes", "no", "yes"])
    assert torch.equal(with_failure[[0, 2, 3]], without)
    assert not with_failure[1].any()


@pytest.mark.parametrize(("policy", "kept"), [("mask", [3, 0]), ("zero", [3, 4])])
def test_samples_that_could_not_be_scored_are_masked_where_the_policy_says_so(file, policy, kept):
    config = {"custom_reward_function": {"path": file}, "reward_model": {"on_error": policy}}
    data = batch(["yes", "boom"])
    scores, extra = compute_reward(data, load_reward_manager(config, TOKENIZER, 0, num_processes=0))
    assert scores.sum(-1).tolist() == [1.0, 0.0]
    assert data.batch["response_mask"].sum(-1).tolist() == kept
    assert extra["scoring_failed"] == [0.0, 1.0]


def test_rows_that_no_function_scores_are_refused_before_training_unless_the_user_brings_one(tmp_path, file):
    row = {"data_source": "mine", "prompt": "1+1?"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    dataset = RLHFDataset(str(tmp_path / "a.jsonl"), TOKENIZER, {})
    with pytest.raises(ValueError, match=r"(?s)data_source.*'mine'"):
        check_rewards(dataset, {})
    check_rewards(dataset, {"custom_reward_function": {"path": file}})
    check_rewards(dataset, {"reward_model": {"enable": True, "path": "a/model"}})


def test_rows_of_an_own_agent_loop_need_no_reward_function(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "1+1?"}))
    dataset = RLHFDataset(str(tmp_path / "a.jsonl"), TOKENIZER, {})
    given = ["data.train_files=a/b", "actor_rollout_ref.model.path=a/b"]
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    check_rewards(dataset, load_config(None, [*given, f"{loop}=my_package.loops.Mine"], check_files=False))
    with pytest.raises(ValueError, match="custom_reward_function"):
        check_rewards(dataset, load_config(None, given, check_files=False))


def test_a_batch_without_a_data_source_is_scored_by_an_own_function(file):
    data = batch(["yes", "no"])
    del data.non_tensor_batch["data_source"]
    config = {"custom_reward_function": {"path": file, "name": "short"}}
    assert load_reward_manager(config, TOKENIZER, 0, num_processes=0)(data).shape == data.batch["responses"].shape
    with pytest.raises(ValueError, match=r"(?s)data\.reward_fn_key.*'data_source'"):
        load_reward_manager({}, TOKENIZER, 0, num_processes=0)(data)


def test_a_trajectory_is_scored_by_its_last_row_and_masked_whole():
    """Three rows of two trajectories: the reward sees two answers; where the first cannot be scored, both rows go."""

    class Manager:
        on_error = "mask"

        def __call__(self, data, return_dict):
            assert data.batch["responses"].tolist() == [[3, 4], [5, 6]]
            extra = {"acc": [0.5, 1.0], "scoring_failed": [1.0, 0.0]}
            return {"reward_tensor": torch.tensor([[0.0, 0.0], [0.0, 1.0]]), "reward_extra_info": extra}

    tensors = {"responses": torch.tensor([[1, 2], [3, 4], [5, 6]]), "response_mask": torch.ones(3, 2)}
    data = DataProto.from_dict(tensors, {"trajectory": object_array(["a", "a", "b"])})
    scores, extra = compute_reward(data, Manager())
    assert scores.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert extra == {"acc": [0.5, 0.5, 1.0], "scoring_failed": [1.0, 1.0, 0.0]}
    assert data.batch["response_mask"].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


def test_an_async_function_is_told_of_the_reward_models_server(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import asyncio\n\n"
        "async def mine(solution_str, ground_truth, raw_prompt, reward_router_address, reward_model_tokenizer):\n"
        "    await asyncio.sleep(0)\n"
        "    ids = reward_model_tokenizer(solution_str)['input_ids']\n"
        "    return {'score': len(ids), 'at': reward_router_address, 'asked': raw_prompt[0]['content']}\n"
    )
    TOKENIZER.save_pretrained(tmp_path / "judge")
    given = {
        "reward": {
            "num_workers": 1,
            "custom_reward_function": {"path": str(tmp_path / "mine.py"), "name": "mine"},
            "reward_manager": {"source": "register", "name": "dapo"},
            "reward_model": {"model_path": str(tmp_path / "judge")},
        },
        "reward_model": {"url": "http://10.0.0.5:8001/"},
        "data": {"train_files": ["unused"]},
        "actor_rollout_ref": {"model": {"path": "unused"}},
    }
    config = load_config(given, check_files=False)
    assert config.data.return_raw_chat
    manager = load_reward_manager(config, TOKENIZER)
    try:
        assert isinstance(manager, get_reward_manager_cls("dapo"))
        data = batch(["one two", "three"])
        data.non_tensor_batch["raw_prompt"] = object_array([[{"role": "user", "content": "Count."}]] * 2)
        scores, said = compute_reward(data, manager)
    finally:
        manager.close()
    assert scores.sum(-1).tolist() == [len(TOKENIZER(text)["input_ids"]) for text in ("one two", "three")]
    assert said["at"] == ["10.0.0.5:8001"] * 2
    assert said["asked"] == ["Count."] * 2
    with pytest.raises(ValueError, match=r"\breward_router_address\..*reward_model\.url=host:port"):
        get_custom_reward_fn(load_config({**given, "reward_model": {}}, check_files=False))


def test_a_program_without_a_reward_model_is_told_the_server_by_reward_kwargs(tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def compute_score(solution_str, ground_truth, reward_router_address):\n    return 1.0\n"
    )
    block = {"path": str(tmp_path / "mine.py"), "reward_kwargs": {"reward_router_address": "10.0.0.5:8001"}}
    found = get_custom_reward_fn({"custom_reward_function": block})
    assert found.keywords == {"reward_router_address": "10.0.0.5:8001"}
    with pytest.raises(ValueError, match=r"main_sft.* custom_reward_function\.reward_kwargs\.reward_router_address"):
        get_custom_reward_fn({"custom_reward_function": {"path": str(tmp_path / "mine.py")}})
