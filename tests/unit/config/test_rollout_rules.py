"""Each engine's own keys: what it has works, what it has not is refused, and a missing package is named."""

from __future__ import annotations

import importlib.util

import pytest

from verl.config import ConfigError, GenerationConfig, load_config, names
from verl.config.rollout import NativeOptions

ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
RUN = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=org/model", "trainer.n_gpus_per_node=2"]
THIRD_PARTY = [name for name, row in names.ROLLOUTS.items() if row.third_party]


def load(*overrides: str, check_files: bool = False):
    return load_config(None, [*RUN, *overrides], check_files=check_files)


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch):
    packages, find = {row.package for row in names.ROLLOUTS.values()}, importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else find(name))


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_an_engine_that_is_not_installed_is_refused_with_how_to_install_it(name, none_installed):
    chosen = f"{ROLLOUT}.name={name}"
    assert load(chosen).actor_rollout_ref.rollout.name == name
    with pytest.raises(ConfigError) as caught:
        load(chosen, check_files=True)
    (problem,) = caught.value.problems
    assert problem.key == f"{ROLLOUT}.name"
    assert names.ROLLOUTS[name].install in problem.fix
    load(chosen, f"{ROLLOUT}.server_urls=[http://127.0.0.1:8000]", check_files=True)


def test_a_generation_says_the_same(none_installed):
    given = ["rollout.name=vllm", "data.path=openai/gsm8k", "data.output_path=out.parquet", "model.path=org/model"]
    with pytest.raises(ConfigError, match=r"rollout.name"):
        load_config(None, given, root=GenerationConfig)


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (["name=native", "quantization=fp8"], "quantization"),
        (["name=native", "expert_parallel_size=2"], "expert_parallel_size"),
        (["name=vllm", "expert_parallel_size=2"], "expert_parallel_size"),
        (["name=vllm", "quantization=int3"], "quantization"),
        (["name=native", "server_urls=[http://host:1]"], "server_urls"),
        (["name=vllm", "server_urls=[host:1]"], "server_urls"),
        (["name=vllm", "server_urls=[http://host:1]", "in_process=True"], "in_process"),
        (["name=vllm", "tensor_model_parallel_size=2", "in_process=True"], "in_process"),
        (["over_sample_rate=0.1"], "over_sample_rate"),
        (["pipeline_model_parallel_size=2"], "pipeline_model_parallel_size"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_its_key(asked, key):
    with pytest.raises(ConfigError) as caught:
        load(*(f"{ROLLOUT}.{each}" for each in asked))
    assert [problem.key for problem in caught.value.problems] == [f"{ROLLOUT}.{key}"]


@pytest.mark.parametrize(
    ("name", "denominator", "works"),
    [("vllm", "full", False), ("vllm", "drawn", True), ("sglang", "full", True), ("sglang", "drawn", False)],
)
@pytest.mark.parametrize("user", ["bypass_mode=True", "rollout_is=token"])
def test_log_probs_that_an_engine_does_not_report_cannot_correct_for_truncated_sampling(name, denominator, works, user):
    chosen = [f"{ROLLOUT}.name={name}", f"{CORRECTION}.denominator={denominator}", f"{CORRECTION}.{user}"]
    load(*chosen)
    if works:
        load(*chosen, f"{ROLLOUT}.top_p=0.9")
        return
    with pytest.raises(
        ConfigError, match=rf"\.denominator = {denominator}: .*\.name = {name} .*\.top_p = 0\.9"
    ) as caught:
        load(*chosen, f"{ROLLOUT}.top_p=0.9")
    assert [problem.key for problem in caught.value.problems] == [f"{CORRECTION}.denominator"]


def test_raw_log_probs_are_refused():
    with pytest.raises(ConfigError, match=r"rollout_correction\.denominator .*logprobs_mode\) = raw_logprobs"):
        load(f"{ROLLOUT}.logprobs_mode=raw_logprobs")


# Keys of the field as a launch script brings them along.
SCRIPT = [
    "free_cache_engine=True",
    "enable_sleep_mode=True",
    "enforce_eager=False",
    "cudagraph_capture_sizes=[1,2,4]",
    "gpu_memory_utilization=0.6",
    "data_parallel_size=1",
    "expert_parallel_size=2",
    "tensor_model_parallel_size=2",
    "pipeline_model_parallel_size=1",
    "max_num_batched_tokens=8192",
    "max_num_seqs=256",
    "enable_prefix_caching=True",
    "enable_chunked_prefill=True",
    "load_format=dummy",
    "logprobs_mode=processed_logprobs",
    "calculate_log_probs=True",
    "seed=1",
    "quantization=fp8",
    "skip_tokenizer_init=True",
    "over_sample_rate=0",
    "multi_stage_wake_up=True",
    "engine_kwargs.vllm.swap_space=4",
    "checkpoint_engine.backend=naive",
    "prometheus.enable=True",
    "prometheus.port=9500",
    "checkpoint_engine.update_weights_bucket_megabytes=2048",
]


def test_every_key_of_the_field_composes():
    rollout = load(f"{ROLLOUT}.name=vllm", *(f"{ROLLOUT}.{key}" for key in SCRIPT)).actor_rollout_ref.rollout
    assert (rollout.cudagraph_capture_sizes, rollout.expert_parallel_size, rollout.quantization) == (
        [1, 2, 4],
        2,
        "fp8",
    )
    assert rollout.checkpoint_engine.update_weights_bucket_megabytes == 2048
    assert (rollout.prometheus.enable, rollout.prometheus.port) == (True, 9500)


def test_devices_of_its_own_are_a_pool():
    config = load(f"{ROLLOUT}.nnodes=2")
    assert config.resource_pool_spec == {"global_pool": [2], "rollout_pool": [2, 2]}
    assert (config.role_mapping["rollout"], config.role_mapping["actor"]) == ("rollout_pool", "global_pool")
    assert load(f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1").resource_pool_spec["rollout_pool"] == [1]
    assert load().role_mapping["rollout"] == "global_pool"


@pytest.mark.parametrize(
    ("overrides", "frees"),
    [
        ([], True),
        ([f"{ROLLOUT}.free_cache_engine=False"], False),
        ([f"{ROLLOUT}.nnodes=1"], False),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://host:1]"], False),
        ([f"{ROLLOUT}.free_weights=False"], False),
    ],
)
def test_weights_are_let_go_where_training_needs_the_room(overrides, frees):
    assert load(*overrides).actor_rollout_ref.rollout.free_weights is frees


@pytest.mark.parametrize("option", ["block_size=abc", "block_size=null", "block_size=16.5", "num_blocks=0"])
def test_sizes_of_the_native_engine_are_integers_of_at_least_1(option):
    config = load(f"+{ROLLOUT}.engine_kwargs.native.{option}")
    with pytest.raises(ValueError, match=rf"^engine_kwargs\.native: .*{{'{option.split('=')[0]}': "):
        NativeOptions.from_config(config.actor_rollout_ref.rollout)
