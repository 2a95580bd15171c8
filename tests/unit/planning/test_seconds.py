"""Expected seconds of a step: the measured rates, their interpolation, and scaling to other GPUs."""

import pytest

from verl.config import SFTConfig, load_config
from verl.planning.catalog import GPUS, KNOWN_MODELS, MEASURED_GPU_RATES, find_gpu, gpu_of_device, known_shape
from verl.planning.phases import GB
from verl.planning.plan import memory_plan
from verl.planning.seconds import (
    MEASURED_DECODE_STEPS,
    MEASURED_RATES,
    MeanLengths,
    decode_seconds,
    forward_flops,
    pass_flops,
    reached_flops,
    step_seconds,
    supervised_seconds,
    total_seconds,
)

H200 = GPUS["h200"]
ACTOR = "actor_rollout_ref.actor"


def load(*overrides):
    base = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.device=cuda", "trainer.n_gpus_per_node=1"]
    return load_config(None, [*base, "algorithm=grpo", *overrides], check_files=False)


def seconds(config, name="Qwen2.5-0.5B", gpu=H200, lengths=MeanLengths()):  # noqa: B008
    shapes = {"actor": known_shape(name), "critic": known_shape(name, "value")}
    plan = memory_plan(config, shapes, gpu.memory)
    return {phase.phase: phase for phase in step_seconds(config, shapes, plan, gpu, lengths)}


@pytest.mark.parametrize(("model", "sequences", "context"), MEASURED_DECODE_STEPS)
def test_decode_steps_are_within_a_tenth_of_the_measured_ones(model, sequences, context):
    measured, _ = MEASURED_DECODE_STEPS[model, sequences, context]
    planned = 1e3 * decode_seconds(known_shape(model), sequences, context, MEASURED_GPU_RATES)
    assert planned == pytest.approx(measured, rel=0.1)


def test_every_measured_rate_has_a_source_and_is_reproduced():
    for row in MEASURED_RATES:
        assert row.source.startswith("docs/")
        shape, length = known_shape(row.model), row.prompt + row.response
        share = row.response / length
        flops = pass_flops(shape, "causal_lm", row.passes, length, share, row.checkpointing, False)
        rate = reached_flops(row.passes, shape.parameters)
        assert rate / flops == pytest.approx(row.tokens_per_second)


def test_flops_of_a_small_model_by_hand():
    # Widths: hidden and queries 896, keys 128, MLP 4864; the head computes half of the tokens.
    layers, head = forward_flops(known_shape("Qwen2.5-0.5B"), "causal_lm", 0, 0.5)
    assert layers == 24 * 2 * ((2 * 896 + 2 * 128) * 896 + 3 * 896 * 4864)
    assert head == 151936 * 896
    with_attention, _ = forward_flops(known_shape("Qwen2.5-0.5B"), "value", 1000, 1.0)
    assert with_attention - layers == 24 * 2 * 896 * 1000


def test_rates_between_measured_sizes_are_interpolated_and_constant_outside():
    small, middle, large = (reached_flops("update", size) for size in (494e6, 900e6, 1.54e9))
    assert small < middle < large
    assert reached_flops("update", 1e6) == reached_flops("update", 400e6)
    assert reached_flops("update", 70e9) == reached_flops("update", 8e9)


# docs/results.md, (a): 32 x 8 rows of 128 + 256 tokens at 110,600 tokens/s.
MEASURED_WORKLOAD = (
    "data.train_batch_size=32",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=8",
    "data.max_prompt_length=128",
    "data.max_response_length=256",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
    f"{ACTOR}.use_prefix_grouper=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
)


def test_the_update_of_the_measured_workload_takes_the_measured_seconds():
    phases = seconds(load(*MEASURED_WORKLOAD))
    assert phases["update_actor"].seconds == pytest.approx(32 * 8 * 384 / 110_600, rel=0.01)
    assert phases["gen"].seconds == pytest.approx(0.53, rel=0.1)
    assert phases["update_weights"].seconds == pytest.approx(0.05, rel=0.1)
    assert "old_log_prob" not in phases, "the update provides them"
    assert all(phase.measured for phase in phases.values())


def test_responses_to_a_prompt_compute_it_once():
    """8 responses: 272 instead of 384 tokens each, and 128 * 128 pairs of tokens less for 7 of 8 responses."""
    shape = known_shape("Qwen2.5-0.5B")
    plain = 384 * pass_flops(shape, "causal_lm", "update", 384, 256 / 384, False, False)
    shared = 272 * pass_flops(shape, "causal_lm", "update", (384**2 - 7 / 8 * 128**2) / 272, 256 / 272, False, False)
    times = {
        mode: seconds(load(*MEASURED_WORKLOAD, f"{ACTOR}.use_prefix_grouper={mode}"))["update_actor"].seconds
        for mode in ("False", "True", "auto")
    }
    assert times["True"] / times["False"] == pytest.approx(shared / plain, rel=1e-3)
    assert times["auto"] == times["True"]
    few = [f"{ACTOR}.use_prefix_grouper=auto", "data.max_prompt_length=16"]
    long = load(*MEASURED_WORKLOAD, *few), load(*MEASURED_WORKLOAD, *few[1:])
    assert seconds(long[0]) == seconds(long[1]), "auto needs to save a tenth of the tokens"


def test_other_gpus_are_scaled_and_marked_as_estimates():
    config = load()
    here, there = seconds(config), seconds(config, gpu=GPUS["a100-80g"])
    assert there["update_actor"].seconds / here["update_actor"].seconds == pytest.approx(989 / 312, rel=1e-6)
    assert not any(phase.measured for phase in there.values())
    assert seconds(config, gpu=find_gpu("80")) == {}, "rates of a GPU are unknown if only its memory is"


def test_offload_checkpointing_and_shorter_responses_change_the_seconds():
    plain = seconds(load())
    offload = seconds(load(f"{ACTOR}.fsdp_config.optimizer_offload=True"))
    moved = 2 * 8 * known_shape("Qwen2.5-0.5B").parameters / 55e9
    assert offload["update_actor"].seconds - plain["update_actor"].seconds == pytest.approx(moved)
    faster = seconds(load("actor_rollout_ref.model.enable_gradient_checkpointing=False"))
    assert faster["update_actor"].seconds < plain["update_actor"].seconds
    shorter = seconds(load(), lengths=MeanLengths(response=100))
    assert shorter["gen"].seconds < plain["gen"].seconds
    two = seconds(load("trainer.n_gpus_per_node=2"))
    assert two["update_actor"].seconds < plain["update_actor"].seconds
    assert not two["update_actor"].measured
    far = seconds(load("trainer.nnodes=2"))
    assert far["update_actor"].seconds > two["update_actor"].seconds, "the link between nodes is slower"


def test_a_critic_has_phases_and_generation_on_its_own_devices_overlaps():
    phases = seconds(load("algorithm=ppo"))
    assert {"values", "update_critic"} <= set(phases)
    config = load(
        "trainer.mode=async", "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"
    )
    times = list(seconds(config).values())
    others = sum(phase.seconds for phase in times if phase.phase != "gen")
    generation = next(phase.seconds for phase in times if phase.phase == "gen")
    assert total_seconds(config, times) == max(generation, others)


def test_supervised_runs():
    base = ["data.train_files=x", "model.path=y", "trainer.device=cuda", "trainer.n_gpus_per_node=1"]
    config = load_config(None, base, check_files=False, root=SFTConfig)
    (phase,) = supervised_seconds(config, known_shape("Qwen2.5-1.5B"), H200)
    tokens = config.rows_per_step * config.data.max_length
    assert 20_000 < tokens / phase.seconds < 60_000
    assert supervised_seconds(config, known_shape("Qwen2.5-1.5B"), find_gpu("80")) == []


def test_gpus_by_name_size_and_driver_name():
    assert find_gpu("H200") is H200
    assert find_gpu("48GB").memory.total == 48 * GB
    assert gpu_of_device("NVIDIA H200", int(139.8 * GB)).rates == H200.rates
    assert gpu_of_device("NVIDIA A100-SXM4-40GB", 40 * GB).name == "a100-40g"
    assert gpu_of_device("NVIDIA Unknown", 40 * GB).rates is None
    for name in ("h300", "0", "", "80 TB"):
        with pytest.raises(ValueError, match="--gpu") as error:
            find_gpu(name)
        assert all(known in str(error.value) for known in GPUS)


def test_known_models_grow():
    sizes = [known_shape(name).parameters for name in KNOWN_MODELS]
    assert sizes == sorted(sizes)
    assert [round(size / 1e9, 2) for size in sizes] == [0.49, 1.54, 3.09, 7.62, 14.77, 32.76, 72.71]
