"""The memory plan counts engines that serve: the run's own judge, and the one that answers in a supervised run."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
from transformers import AutoConfig

from tests.support.tiny import save_tiny_model
from verl.config import ConfigError, SFTConfig, load_config
from verl.config.layout import active_roles
from verl.config.schema import get_path, set_path
from verl.planning.advice import check_fits
from verl.planning.check import check_memory
from verl.planning.host import HostMemory
from verl.planning.phases import GB, DeviceMemory
from verl.planning.plan import memory_plan, supervised_memory_plan
from verl.planning.remedies import applicable_remedies
from verl.planning.shapes import ModelShape

SIZES = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
SHAPE = ModelShape.from_config(
    AutoConfig.for_model(
        "qwen2", **SIZES, intermediate_size=4864, vocab_size=151936, max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
)  # fmt: skip
GRPO = ("algorithm=grpo", "data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.n_gpus_per_node=1")
JUDGE = ("reward_model.enable=True", "reward_model.path=z", "reward_model.judge.enable=True")
SFT = ("data.train_files=x", "model.path=y", "trainer.device=cuda", "trainer.n_gpus_per_node=1")
ANSWERS = "data.val_prompt_files=[v.parquet]"
GPU = DeviceMemory("cuda", 40 * GB, "a GPU")


def load(*overrides, device="cuda"):
    return load_config(None, [*GRPO, f"trainer.device={device}", *overrides], check_files=False)


def plan_of(config, device=GPU):
    return memory_plan(config, {"actor": SHAPE, "judge": SHAPE}, device, HostMemory(500 * GB))


def test_a_judge_on_shared_devices_takes_its_share_while_it_judges_and_waits_on_the_host():
    plan, without = plan_of(load(*JUDGE)), plan_of(load())
    assert [phase.phase for phase in plan.phases if not phase.on_host] == [
        "gen", "judge", "old_log_prob", "update_actor",
    ]  # fmt: skip
    judging = plan.phase("judge").parts["judge"]
    share = (
        0.4 * 40 * GB
    )  # reward_model.rollout.gpu_memory_utilization, of which logits may take some; steps come on top
    assert share - 1 * GB < judging < share + 2 * GB
    assert plan.phase("judge").parts["optimizer"] == plan.phase("update_actor").parts["optimizer"]
    for name in ("gen", "old_log_prob", "update_actor"):
        assert plan.phase(name).parts["judge"] < 1 * GB, "its graphs"
        assert plan.phase(name).parts["rollout"] == without.phase(name).parts["rollout"]
    waits = plan.phase("train").parts["offloaded"] - without.phase("train").parts["offloaded"]
    assert waits == 2 * SHAPE.parameters
    assert "judge" in plan.render().splitlines()[1].split()


def test_a_judge_on_devices_of_its_own_is_there_all_the_time_and_nowhere_else():
    plan = plan_of(load(*JUDGE, "reward_model.enable_resource_pool=True", "reward_model.n_gpus_per_node=1"))
    judging = plan.phase("judge")
    assert judging.pool != plan.phase("gen").pool
    assert judging.parts["judge"] > 0.3 * 40 * GB
    assert judging.parts["weights"] == judging.parts["rollout"] == 0
    assert all(plan.phase(name).parts["judge"] == 0 for name in ("gen", "old_log_prob", "update_actor"))
    assert plan.phase("train").parts["offloaded"] == 0


def test_the_judge_of_a_function_may_be_a_classifier_which_keeps_no_kv():
    config = load(*JUDGE[:2], "custom_reward_function.path=mine.py")
    plan = memory_plan(config, {"actor": SHAPE, "reward_model": SHAPE}, GPU)
    assert 2 * SHAPE.parameters < plan.phase("judge").parts["judge"] < 2 * SHAPE.parameters + 2 * GB
    assert plan.phase("update_actor").parts["weights"] == 4 * SHAPE.parameters, "the actor's alone"


@pytest.mark.parametrize("config", [load(*JUDGE, "actor_rollout_ref.rollout.free_cache_engine=False")])
def test_every_remedy_of_a_judge_shrinks_its_phase(config):
    before = plan_of(config).phase("judge").total
    found = list(applicable_remedies("judge", lambda key: get_path(config, key), active_roles(config)))
    assert f"{found[0][0].key}={found[0][1]}" == "reward_model.rollout.gpu_memory_utilization=0.4"
    for remedy, now in found:
        changed = copy.deepcopy(config)
        set_path(changed, remedy.key, list(remedy.values(now))[-1])
        assert plan_of(changed).phase("judge").total < before, remedy.key


def test_a_run_whose_judge_has_no_room_is_refused_with_its_keys():
    small = DeviceMemory("cuda", 14 * GB, "a GPU")
    plan_of_small = lambda config: plan_of(config, small)  # noqa: E731
    config = load(*JUDGE, "reward_model.rollout.gpu_memory_utilization=0.8")
    assert plan_of_small(config).worst_phase.phase == "judge"
    with pytest.raises(ConfigError, match=r"reward_model\.rollout\.gpu_memory_utilization"):
        check_fits(config, plan_of_small)


def test_a_judge_that_names_no_longest_sequence_is_refused_by_the_key_that_sets_it():
    shapes = {"actor": SHAPE, "judge": replace(SHAPE, positions=None)}
    with pytest.raises(ValueError, match=r"^reward_model\.rollout\.max_model_len: "):
        memory_plan(load(*JUDGE), shapes, GPU)
    with_limit = memory_plan(load(*JUDGE, "reward_model.rollout.max_model_len=4096"), shapes, GPU)
    assert with_limit.phase("judge").parts["judge"] > 2 * SHAPE.parameters


def test_the_plan_of_a_judge_on_this_machine_is_logged(tmp_path, caplog):
    folder = save_tiny_model(tmp_path)
    paths = (f"actor_rollout_ref.model.path={folder}", f"reward_model.path={folder}")
    with caplog.at_level(logging.INFO):
        plan = check_memory(load(*JUDGE, *paths, device="cpu"))
    assert "without the" not in caplog.text
    assert plan.phase("judge").parts["judge"] > plan.phase("update_actor").parts["judge"] > 0, "parked, without KV"


def test_answers_of_a_supervised_run_are_a_phase_with_an_engine():
    load_sft = lambda *more: load_config(None, [*SFT, *more], check_files=False, root=SFTConfig)  # noqa: E731
    plain, plan = (supervised_memory_plan(load_sft(*more), SHAPE, GPU) for more in ((), (ANSWERS,)))
    assert [phase.phase for phase in plain.phases if not phase.on_host] == ["sft"]
    assert [phase.phase for phase in plan.phases if not phase.on_host] == ["sft", "sft_answers"]
    answering = plan.phase("sft_answers").parts
    assert (answering["weights"], answering["optimizer"]) == (4 * SHAPE.parameters, 8 * SHAPE.parameters)
    assert answering["rollout"] > 2 * SHAPE.parameters
    assert plain.phase("sft").total <= plan.phase("sft").total < plain.phase("sft").total + 1 * GB
    assert "sft_answers" in plan.render()
    tight = DeviceMemory("cuda", int(plan.phase("sft").total), "a GPU")
    config = load_sft(ANSWERS, "rollout.gpu_memory_utilization=0.9", "rollout.max_new_tokens=8192")
    with pytest.raises(ConfigError, match=r"sft_answers .*rollout\.gpu_memory_utilization="):
        check_fits(config, lambda changed: supervised_memory_plan(changed, SHAPE, tight))
