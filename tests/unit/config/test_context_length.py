"""Prompt and answer that a model cannot read are refused with everything else, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config import ConfigError, GenerationConfig, SFTConfig, generation, load_config, supervised
from verl.config.context_length import check_context_length, context_limit

ROLLOUT = "actor_rollout_ref.rollout"


def yarn(**changes):
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **changes}}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"text_config": {"max_position_embeddings": 8192}, "max_position_embeddings": 7}, 8192),
        # Names the pretrained length, which the factor extends.
        ({"max_position_embeddings": 32768, **yarn(original_max_position_embeddings=32768)}, 131072),
        ({"max_position_embeddings": 32768, **yarn()}, 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 2}}, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 1.5}}, 3072),
        # Names the extended length.
        ({"max_position_embeddings": 163840, **yarn(factor=40, original_max_position_embeddings=4096)}, 163840),
        (
            {"max_position_embeddings": 131072, **yarn(rope_type="llama3", original_max_position_embeddings=8192)},
            131072,
        ),
        ({"max_position_embeddings": 131072, **yarn(rope_type="longrope")}, 131072),
        ({"max_position_embeddings": 131072, "rope_local_base_freq": 1e4, **yarn(rope_type="linear")}, 131072),
        # As newer transformers write it, also by kind of layer.
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 128),
        (
            {"max_position_embeddings": 64, "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2}}},
            64,
        ),
    ],
)
def test_the_limit_is_what_the_config_says(config, limit):
    assert context_limit(config) == limit


@pytest.fixture
def model(tmp_path):
    def make(name: str = "model", positions: int = 1000, tokenizer: str = "{}", **config) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions, **config}))
        (folder / "tokenizer.json").write_text(tokenizer)
        return str(folder)

    return make


def load(path, *overrides, prompt=400, answer=600, check_files=True):
    given = ["data.train_files=openai/gsm8k", f"actor_rollout_ref.model.path={path}", "trainer.n_gpus_per_node=1"]
    given += [f"data.max_prompt_length={prompt}", f"data.max_response_length={answer}"]
    return load_config(None, [*given, *overrides], check_files=check_files)


def problems(path, *overrides, **lengths):
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides, **lengths)
    return {problem.key: problem for problem in caught.value.problems}


def test_what_fits_exactly_runs_and_one_token_more_is_refused_with_keys_and_remedy(model):
    path = model()
    load(path)
    (problem,) = problems(path, answer=601).values()
    assert str(problem).startswith(
        "data.max_response_length = 601: with data.max_prompt_length = 400 a sequence has up to 1001 tokens, more than"
        f" the 1000 positions of actor_rollout_ref.model.path = {path}. Set it to 600 or less"
    )


@pytest.mark.parametrize(
    ("overrides", "lengths", "key"),
    [
        ([], {"prompt": 1000, "answer": 1}, "data.max_prompt_length"),
        ([f"{ROLLOUT}.max_new_tokens=601"], {"answer": 700}, f"{ROLLOUT}.max_new_tokens"),
        ([f"{ROLLOUT}.max_new_tokens=600", f"{ROLLOUT}.val_kwargs.max_new_tokens=650"], {"answer": 700},
         f"{ROLLOUT}.val_kwargs.max_new_tokens"),
        ([f"{ROLLOUT}.max_model_len=1001"], {}, f"{ROLLOUT}.max_model_len"),
    ],
)  # fmt: skip
def test_the_key_that_is_too_large_is_named(model, overrides, lengths, key):
    assert list(problems(model(), *overrides, **lengths)) == [key]


def test_a_longer_padded_width_alone_is_no_problem(model):
    """Answers end at rollout.max_new_tokens, whatever room the batch has for them."""
    load(model(), f"{ROLLOUT}.max_new_tokens=600", answer=5000)


def test_overrides_of_the_models_config_count(model):
    path, longer = model(), "actor_rollout_ref.model.override_config={max_position_embeddings: 2000}"
    load(path, "algorithm.adv_estimator=grpo", longer, answer=1600)
    assert list(problems(path, longer, answer=1600)) == ["critic.model.path"], "the critic has overrides of its own"
    scaled = "actor_rollout_ref.model.override_config={rope_scaling: {rope_type: yarn, factor: 2.0}}"
    load(path, "algorithm.adv_estimator=grpo", scaled, answer=1600)
    assert "data.max_response_length" in problems(path, scaled, answer=1601)


def test_it_is_told_with_the_other_problems(model):
    found = problems(model(), f"{ROLLOUT}.n=1", "algorithm.adv_estimator=grpo", answer=900)
    assert set(found) == {f"{ROLLOUT}.n", "data.max_response_length"}


def test_a_critic_that_reads_less_is_refused_and_the_policys_own_is_told_once(model):
    path, small = model(), model("critic", 800)
    assert list(problems(path, f"critic.model.path={small}")) == ["critic.model.path"]
    assert list(problems(path, answer=601)) == ["data.max_response_length"]
    load(path, f"critic.model.path={small}", "algorithm.adv_estimator=grpo")


def test_a_reward_model_in_the_policys_tokens_must_read_them_all_others_cut(model):
    path = model()
    reward = ("reward_model.enable=True", f"reward_model.path={model('same', 800)}")
    assert list(problems(path, *reward)) == ["reward_model.path"]
    other = Path(model("other", 800, tokenizer='{"other": 1}'))
    reward = ("reward_model.enable=True", f"reward_model.path={other}")
    assert problems(path, *reward)["reward_model.max_length"].fix.startswith("Set it to 800 or less")
    load(path, *reward, "reward_model.max_length=800")
    assert "reward_model.max_length" in problems(path, *reward, "reward_model.max_length=801")
    (other / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    load(path, *reward)
    (other / "tokenizer_config.json").write_text('{"model_max_length": 5')
    assert "reward_model.max_length" in problems(path, *reward), "its limit is unknown"


def test_a_hub_name_is_checked_where_it_was_fetched_to(model):
    config, path = load("some/model", answer=601), model()
    with pytest.raises(ConfigError, match=r"data\.max_response_length = 601"):
        check_context_length(config, {"some/model": path})
    given = ("critic.model.path=some/critic", "reward_model.enable=True", "reward_model.path=some/judge")
    small = model("small", 800)
    with pytest.raises(ConfigError) as error:
        check_context_length(load(path, *given), {"some/critic": small, "some/judge": small})
    assert "critic.model.path = some/critic: has 800 positions" in str(error.value)
    assert "reward_model.path = some/judge: has 800 positions" in str(error.value)


def test_rows_to_learn_that_a_model_cannot_read_are_refused(model):
    def sft(path: str, length: int) -> SFTConfig:
        given = ["data.train_files=openai/gsm8k", f"model.path={path}", f"data.max_length={length}"]
        return load_config(None, given, root=SFTConfig)

    path = model()
    sft(path, 1000)
    with pytest.raises(ConfigError, match=r"(?s)data\.max_length.*model\.path"):
        sft(path, 1001)
    with pytest.raises(ConfigError, match=r"data\.max_length = 1001"):
        supervised.check_context_length(sft("some/model", 1001), path)


def test_what_is_told_of_a_machine_is_not_asked_without_its_files(model):
    load(model(), answer=601, check_files=False)


def generate_with(path, **rollout):
    data = {"path": "openai/gsm8k", "output_path": "/tmp/answers.parquet", "max_prompt_length": 400}
    return load_config({"data": data, "model": {"path": path}, "rollout": rollout}, root=GenerationConfig)


def test_generation_refuses_the_same(model):
    path = model()
    generate_with(path, max_new_tokens=600)
    generate_with(path, max_new_tokens=900, max_model_len=1000)  # long answers to long prompts are cut, and said
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len"):
        generate_with(path, max_new_tokens=601)
    config = generate_with("some/model", max_new_tokens=601)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens = 601\)"):
        generation.check_context_length(config, path)


@pytest.mark.slow
def test_the_command_ends_with_2_before_anything_starts(model, tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"actor_rollout_ref.model.path={model()}"]
    row = {"data_source": "openai/gsm8k", "prompt": "1 + 1", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 512)
    command += ["data.train_files=train.jsonl", "data.max_prompt_length=400", "data.max_response_length=4096"]
    done = subprocess.run([*command, "trainer.n_gpus_per_node=1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "1 problem in the configuration:"
    assert "1. data.max_response_length = 4096:" in done.stderr
