"""What is not built is refused; what would have no effect is named; nothing else is touched."""

from __future__ import annotations

import pytest

from verl.config import ConfigError, load_config, names

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RUN = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=org/model", "trainer.n_gpus_per_node=2"]


def load(*overrides: str):
    return load_config(None, [*RUN, *overrides])


def problems(*overrides: str):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return caught.value.problems


def test_a_tensor_parallel_hf_engine_is_refused():
    (problem,) = problems(f"{ROLLOUT}.name=hf", f"{ROLLOUT}.tensor_model_parallel_size=2")
    assert problem.key == f"{ROLLOUT}.tensor_model_parallel_size"


def test_a_critic_that_is_not_started_may_name_any_engine():
    load("algorithm.adv_estimator=grpo", "critic=megatron")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (f"{ROLLOUT}.engine_kwargs.vllm.seed=1", "has no effect with actor_rollout_ref.rollout.name = native"),
        (f"{ROLLOUT}.load_format=safetensors", "is treated as auto"),
    ],
)
def test_a_key_without_effect_is_named_with_the_truth(asked, words):
    key = asked.partition("=")[0].removesuffix(".seed")
    (notice,) = [text for text in load(asked).notices if text not in load().notices]
    assert notice.startswith(key)
    assert words in notice


def test_a_plain_run_is_not_refused():
    for overrides in (
        ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True"],
        [f"{ACTOR}.ulysses_sequence_parallel_size=2"],
        ["actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.use_kl_loss=True"],
        *([f"algorithm.adv_estimator={estimator}"] for estimator in names.ADV_ESTIMATORS),
    ):
        assert not any("not built" in notice for notice in load(*overrides).notices)
