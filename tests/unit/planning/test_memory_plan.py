"""The memory plan: its formulas against what real models keep, its table against the configuration, its refusals."""

import logging
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from tests.support.tiny import save_tiny_model, tiny_config, tiny_model
from verl.config import ConfigError, RMConfig, SFTConfig, load_config
from verl.config.schema import get_path
from verl.planning.advice import cheapest_changes, check_fits
from verl.planning.check import check_memory, check_supervised_memory, exclude_shared_prefixes
from verl.planning.fsdp import FSDPModelMemory
from verl.planning.phases import DEVICE_PARTS, GB, HOST_PARTS, DeviceMemory, MemoryPlan, PhaseMemory
from verl.planning.plan import memory_plan, micro_batch_sizes, role_models, supervised_memory_plan
from verl.planning.remedies import applicable_remedies
from verl.planning.shapes import ModelShape
from verl.utils.buffer_sizes import MAX_GATHERED_KEYS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SHAPE = ModelShape.from_config(
    AutoConfig.for_model(
        "qwen2",
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
)


def load(*overrides, device="cuda"):
    given = ["data.train_files=x", "actor_rollout_ref.model.path=y", f"trainer.device={device}"]
    given += ["trainer.n_gpus_per_node=1", f"{ROLLOUT}.max_num_seqs=1024"]
    return load_config(None, [*given, *overrides], check_files=False)


def plan_of(config, gigabytes=None):
    device = None if gigabytes is None else DeviceMemory("cuda", int(gigabytes * GB), "a GPU")
    return memory_plan(config, {"actor": SHAPE, "critic": SHAPE, "reward_model": SHAPE}, device)


def phase(plan, name):
    return next(found for found in plan.phases if found.phase == name)


# ---------------------------------------------------------------- formulas


def test_checkpointed_compiled_layers_also_save_the_outputs_of_attention():
    tokens, peaks = 8192, {}
    for compiled in (False, True):
        # With adapters the peak is always in the first layer of the backward pass.
        model = FSDPModelMemory(replace(SHAPE, adapter_parameters=1), compiled=compiled, checkpointing=True)
        layer = tokens * (model.layer_activations() + model.backward_temporaries())
        peaks[compiled] = model.update(tokens, 1, 1)["activations"] - layer
    # 14 heads of 64 in bfloat16, and a float32 number per head and token.
    assert peaks[True] - peaks[False] == 24 * tokens * (2 * 14 * 64 + 4 * 14)


def bytes_kept(model, tokens):
    """What autograd keeps of a forward pass, parameters not counted, each storage once."""
    own = {value.untyped_storage().data_ptr() for value in [*model.parameters(), *model.buffers()]}
    kept = {}

    def keep(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model.base_model(input_ids=torch.randint(5, 260, (1, tokens)), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_layer_keeps_is_what_autograd_keeps_of_it(family, dtype):
    tokens, kept = 64, []
    for layers in (1, 3):
        model = tiny_model(family, num_hidden_layers=layers, intermediate_size=192).to(dtype).train()
        kept.append(bytes_kept(model, tokens))
    shape = ModelShape.from_config(model.config)
    planned = FSDPModelMemory(shape, compute_bytes=dtype.itemsize).layer_activations()
    assert (kept[1] - kept[0]) / 2 / tokens == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model_that_is_built(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    shape = ModelShape.from_config(model.config)
    assert shape.parameters == wanted
    value = ModelShape.from_config(model.config, "value")
    assert value.parameters == sum(parameter.numel() for parameter in model.base_model.parameters()) + shape.hidden + 1
    assert ModelShape.from_config(PretrainedConfig()) is None, "nothing is known of its shape"


def test_training_takes_sixteen_bytes_per_parameter_and_bf16_moments_twelve():
    exact, half = FSDPModelMemory(SHAPE), FSDPModelMemory(SHAPE, moment_bytes=2)
    for model, each in ((exact, 16), (half, 12)):
        assert model.weights() + model.moments() + model.gradients() == each * model.shape.parameters
    sharded = FSDPModelMemory(SHAPE, shards=4)
    assert sharded.weights() * 4 == exact.weights()
    frozen = FSDPModelMemory(SHAPE, frozen=True)
    assert (frozen.weights(), frozen.moments(), frozen.gradients()) == (2 * frozen.shape.parameters, 0, 0)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_the_others():
    tokens = 32768
    plain, checkpointed = (FSDPModelMemory(SHAPE, checkpointing=on).update(tokens, tokens, 1) for on in (False, True))
    assert plain["activations"] > 5 * checkpointed["activations"]
    assert checkpointed["activations"] > tokens * SHAPE.layers * 2 * SHAPE.hidden


def test_attention_over_shared_prefixes_saves_copies_of_keys_and_values():
    """Only in micro-batches limited by tokens: a number of rows has no more keys than without sharing."""

    def saved(mode, *keys):
        models = role_models(load(f"{ACTOR}.use_prefix_grouper={mode}", *keys), {"actor": SHAPE})
        return models["actor"].layer_activations()

    dynamic = f"{ACTOR}.use_dynamic_bsz=True"
    assert saved("auto") == saved("False") == saved("False", dynamic)
    assert saved("auto", dynamic) - saved("False") == (MAX_GATHERED_KEYS - 1) * 2 * SHAPE.key_width * 2  # bf16


def test_inference_copies_keys_that_may_exceed_the_tensors_of_the_mlp():
    many_keys = replace(SHAPE, kv_heads=SHAPE.heads, intermediate=SHAPE.hidden)
    plain, shared = (FSDPModelMemory(many_keys, saved_keys_per_token=copies) for copies in (1.0, MAX_GATHERED_KEYS))
    assert shared.inference_activations() >= plain.inference_activations() + 2 * 2 * 2 * SHAPE.query_width
    few_keys = [FSDPModelMemory(SHAPE, saved_keys_per_token=copies).inference_activations() for copies in (1.0, 5.0)]
    assert few_keys[0] == few_keys[1], "with grouped queries the MLP is larger"


def test_models_without_a_kernel_do_not_share_prefixes_on_a_gpu(caplog):
    shapes = {"actor": replace(SHAPE, sharing_obstacle="no kernel")}
    config = load()
    assert config.actor_rollout_ref.actor.use_prefix_grouper == config.critic.use_prefix_grouper == "auto"
    with caplog.at_level("INFO"):
        exclude_shared_prefixes(config, shapes)
    assert config.actor_rollout_ref.actor.use_prefix_grouper == "false"
    assert config.critic.use_prefix_grouper == "auto", "another model"
    assert caplog.text.count("no kernel") == 1
    with pytest.raises(ConfigError) as caught:
        exclude_shared_prefixes(load(f"{ACTOR}.use_prefix_grouper=True"), shapes)
    (problem,) = caught.value.problems
    assert problem.key == f"{ACTOR}.use_prefix_grouper"
    on_cpu = load(f"{ACTOR}.use_prefix_grouper=True", device="cpu")
    exclude_shared_prefixes(on_cpu, shapes)
    assert on_cpu.actor_rollout_ref.actor.use_prefix_grouper == "true"


def test_gradients_of_earlier_micro_batches_count_unless_they_wait_in_host_memory():
    here = FSDPModelMemory(SHAPE, checkpointing=False)
    away = FSDPModelMemory(SHAPE, checkpointing=False, grad_offload=True)
    assert sum(here.update(8192, 8192, 2).values()) - sum(away.update(8192, 8192, 2).values()) == here.gradients()
    assert here.update(8192, 8192, 1) == away.update(8192, 8192, 1)


# ---------------------------------------------------------------- the plan of a run


def test_phases_are_those_of_the_run():
    names = lambda *overrides: [found.phase for found in plan_of(load(*overrides)).phases if not found.on_host]  # noqa: E731
    grpo = "algorithm=grpo"
    assert names(grpo) == ["gen", "old_log_prob", "update_actor"]
    assert names(grpo, f"{ACTOR}.use_kl_loss=True") == ["gen", "old_log_prob", "ref", "update_actor"]
    assert names() == ["gen", "old_log_prob", "values", "update_critic", "update_actor"]
    reward = ["reward_model.enable=True", "reward_model.path=z"]
    assert "reward" in names(*reward)


def test_offloaded_parts_are_there_only_in_their_own_phases():
    here, away = plan_of(load()), plan_of(load("critic.fsdp_config.optimizer_offload=True"))
    moments = 8 * SHAPE.parameters
    for name in ("gen", "old_log_prob", "values", "update_actor"):
        assert phase(here, name).parts["optimizer"] - phase(away, name).parts["optimizer"] == moments
    assert phase(here, "update_critic") == phase(away, "update_critic")
    weights = plan_of(load(f"{ACTOR}.fsdp_config.param_offload=True"))
    assert phase(weights, "gen").parts["weights"] == 4 * SHAPE.parameters
    assert phase(weights, "update_actor") == phase(here, "update_actor")


def test_a_reference_takes_half_precision_weights_and_none_with_lora_or_offload():
    base = ["algorithm=grpo", f"{ACTOR}.use_kl_loss=True"]
    without = phase(plan_of(load("algorithm=grpo")), "gen").parts["weights"]
    with_reference = phase(plan_of(load(*base)), "gen").parts["weights"]
    assert with_reference - without == 2 * SHAPE.parameters
    offloaded = plan_of(load(*base, "actor_rollout_ref.ref.fsdp_config.param_offload=True"))
    assert phase(offloaded, "gen").parts["weights"] == without
    assert phase(offloaded, "ref").parts["weights"] == with_reference


def test_teachers_are_on_the_device_one_at_a_time_or_all_where_they_stay():
    teachers = [f"distillation.teacher_models.{name}.{key}" for name, key in (("a", "key=x"), ("a", "model_path=x/a"))]
    teachers += ["distillation.enabled=True", "distillation.teacher_models.b.model_path=x/b"]
    stays = "distillation.teacher.fsdp_config.param_offload=False"
    large = replace(SHAPE, layers=2 * SHAPE.layers)
    shapes = {"actor": SHAPE, "critic": SHAPE, "teacher/a": large, "teacher/b": SHAPE}
    alone = phase(plan_of(load()), "old_log_prob").parts["weights"]
    away, here = (memory_plan(load(*teachers, *more), shapes, None) for more in ((), (stays,)))
    weights = [2 * shape.parameters for shape in (large, SHAPE)]
    assert phase(away, "teacher").parts["weights"] == alone + weights[0], "the larger of the two"
    assert phase(here, "teacher").parts["weights"] == alone + sum(weights)
    assert phase(away, "update_actor").parts["weights"] == alone
    assert phase(here, "update_actor").parts["weights"] == alone + sum(weights)


def test_kv_follows_the_share_of_the_device_and_leaves_with_training():
    big, small = (plan_of(load(f"{ROLLOUT}.gpu_memory_utilization={share}"), 24) for share in (0.5, 0.3))
    gap = phase(big, "gen").parts["rollout"] - phase(small, "gen").parts["rollout"]
    assert gap == pytest.approx(0.2 * 24 * GB, rel=0.01)
    assert phase(big, "update_actor").parts["rollout"] < 1.5 * GB
    kept = plan_of(load(f"{ROLLOUT}.free_cache_engine=False"), 24)
    assert phase(kept, "update_actor").parts["rollout"] > 5 * GB


def test_generation_that_overlaps_training_releases_nothing_and_can_be_given_less():
    overlapping = load("trainer.mode=async", "trainer.overlap=True")
    plan = plan_of(overlapping, 24)
    taken = phase(plan, "gen").parts["rollout"]
    assert phase(plan, "update_actor").parts["rollout"] == taken >= phase(plan_of(load(), 24), "gen").parts["rollout"]
    found = {remedy.key for remedy, _ in applicable_remedies("update_actor", lambda key: get_path(overlapping, key))}
    assert f"{ROLLOUT}.gpu_memory_utilization" in found
    assert not found & {f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.free_weights"}
    by_turns = plan_of(load("trainer.mode=async"), 24)
    assert taken - phase(by_turns, "update_actor").parts["rollout"] == 2 * SHAPE.parameters
    apart = load("trainer.mode=async", f"{ROLLOUT}.nnodes=1")
    assert apart.actor_rollout_ref.rollout.free_cache_engine


def test_released_weights_are_absent_in_training_but_not_in_scoring():
    judged = ("reward_model.enable=True", "reward_model.path=z")
    freed, kept = (plan_of(load(*judged, f"{ROLLOUT}.free_weights={free}"), 24) for free in (True, False))
    gaps = {each.phase: kept.phase(each.phase).parts["rollout"] - each.parts["rollout"] for each in freed.phases[:-2]}
    assert {phase: gap for phase, gap in gaps.items() if phase in ("gen", "reward")} == {"gen": 0, "reward": 0}
    assert all(gap == 2 * SHAPE.parameters for phase, gap in gaps.items() if phase not in ("gen", "reward"))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_third_party_engine_takes_its_configured_share_and_keeps_its_process(name):
    engine = (f"{ROLLOUT}.name={name}", f"{ROLLOUT}.gpu_memory_utilization=0.5")
    plan = plan_of(load(*engine), 24)
    more = phase(plan, "gen").parts["rollout"] - 0.5 * 24 * GB
    assert more == pytest.approx(1.5 * GB) if name == "vllm" else 1.5 * GB < more < 8 * GB
    assert phase(plan, "update_actor").parts["rollout"] == pytest.approx(1.5 * GB), "its process, a bucket's buffer"
    kept = plan_of(load(*engine, f"{ROLLOUT}.free_weights=False"), 24)
    assert phase(kept, "update_actor").parts["rollout"] == pytest.approx(1.5 * GB + 2 * SHAPE.parameters)
    if name == "vllm":
        inside = plan_of(load(*engine, f"{ROLLOUT}.in_process=True"), 24)
        assert phase(inside, "update_actor").parts["rollout"] == 0
    served = plan_of(load(*engine, f"{ROLLOUT}.server_urls=[http://host:1]"), 24)
    assert phase(served, "gen").parts["rollout"] == 0


def test_a_tensor_larger_than_a_bucket_and_an_engines_copies_of_what_comes_are_counted():
    """An embedding of 0.25 GB in buckets of 0.1; what comes is there twice before it generates, where KV stays."""
    engine = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.5")
    small = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=100"
    embedding, layer = 2 * SHAPE.embedding_parameters, 2 * SHAPE.layer_parameters / SHAPE.layers
    assert embedding > 250 * 2**20
    freed = plan_of(load(*engine, small), 24)
    assert phase(freed, "update_actor").parts["rollout"] == pytest.approx(GB + embedding)
    assert phase(freed, "gen").parts["rollout"] == pytest.approx(13 * GB + embedding), "a copy takes the KV's room"
    kept = plan_of(load(*engine, small, f"{ROLLOUT}.free_cache_engine=False"), 24)
    assert phase(kept, "gen").parts["rollout"] == pytest.approx(13 * GB + 2 * embedding + layer)


def test_a_pass_has_at_most_the_tokens_of_its_budget_or_of_its_batch():
    fixed = load(
        "data.max_prompt_length=100", "data.max_response_length=300", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"
    )
    assert micro_batch_sizes(fixed, "update_actor") == (3200, 2400, 16)
    dynamic = [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=8192"]
    assert micro_batch_sizes(load(*dynamic), "update_actor")[::2] == (8192, 24)
    on_cpu = load(*dynamic, f"{ROLLOUT}.n=8", device="cpu")
    assert micro_batch_sizes(on_cpu, "update_actor")[:2] == (8192, math.ceil(8192 / 3)), "a budget counts whole rows"
    # With shared prompts, 8 responses of 512 tokens are 80 % of a group's computed tokens instead of a third.
    shared = load(*dynamic, f"{ROLLOUT}.n=8", f"{ACTOR}.use_prefix_grouper=auto")
    assert micro_batch_sizes(shared, "update_actor")[:2] == (8192, math.ceil(0.8 * 8192))
    few = load(*dynamic, "data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=1", "critic.ppo_mini_batch_size=1")
    assert micro_batch_sizes(few, "update_actor")[::2] == (1024 + 512, 1)


def test_the_table_names_phases_and_device():
    text = plan_of(load(), 80).render()
    assert "of 80.0 (a GPU)" in text
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "phase", "gen", "old_log_prob", "values", "update_critic", "update_actor",
        "Host", "phase", "train", "save_checkpoint",
    ]  # fmt: skip


# ---------------------------------------------------------------- refusals


def test_a_plan_that_fits_says_nothing():
    assert check_fits(load(), lambda config: plan_of(config, 80)) == []
    assert check_fits(load(), plan_of) == [], "an unknown device refuses nothing"


def test_a_plan_that_cannot_fit_names_the_cheapest_changes_and_they_make_it_fit():
    config = load(
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=65536",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    )
    with pytest.raises(ConfigError) as caught:
        check_fits(config, lambda config: plan_of(config, 40))
    (problem,) = caught.value.problems
    assert problem.key == f"{ACTOR}.ppo_max_token_len_per_gpu"
    assert "the update_actor phase is planned to take" in problem.why
    assert "of a device's 40.0 GB" in problem.why
    changes, fits = cheapest_changes(config, lambda config: plan_of(config, 40))
    assert fits
    assert [change.key for change in changes] == [f"{ACTOR}.ppo_max_token_len_per_gpu"]
    repaired = load(*(f"{change.key}={change.value}" for change in changes), f"{ACTOR}.use_dynamic_bsz=True")
    assert plan_of(repaired, 40).worst_phase.total <= 40 * GB
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 65536, "the configuration itself is not touched"


def test_changes_go_on_in_the_order_of_cost_and_take_back_what_was_not_needed():
    changes, fits = cheapest_changes(load(), lambda config: plan_of(config, 12))
    keys = [change.key for change in changes]
    assert fits
    assert f"{ACTOR}.fsdp_config.optimizer_offload" in keys
    assert "data.max_response_length" not in keys
    for left_out in changes:
        others = load(*(f"{change.key}={change.value}" for change in changes if change is not left_out))
        assert plan_of(others, 12).worst_phase.total > 12 * GB, f"{left_out.key} was not needed"


def test_a_plan_that_no_change_makes_fit_is_reported():
    with pytest.raises(ConfigError, match=r"ppo_micro_batch_size_per_gpu = 4: .*update_actor.*devices"):
        check_fits(load(), lambda config: plan_of(config, 2))


def test_a_plan_a_little_too_large_is_a_warning():
    config = load(f"{ROLLOUT}.gpu_memory_utilization=0.1")
    needed = phase(plan_of(config), "update_actor").total / GB
    (warning,) = check_fits(config, lambda config: plan_of(config, needed * 0.95))
    assert "may just fit" in warning
    assert "update_actor" in warning


def test_supervised_fine_tuning_has_one_phase():
    given = ["data.train_files=x", "model.path=y", "trainer.device=cuda", "trainer.n_gpus_per_node=1"]
    config = load_config(None, given, check_files=False, root=SFTConfig)
    plan = supervised_memory_plan(config, SHAPE, DeviceMemory("cuda", 2 * GB, "a GPU"))
    assert [found.phase for found in plan.phases] == ["sft", "sft_train", "sft_save_checkpoint"]
    assert plan.worst_phase.total > 16 * SHAPE.parameters * 0.5
    with pytest.raises(ConfigError):
        check_fits(config, lambda c: supervised_memory_plan(c, SHAPE, DeviceMemory("cuda", 2 * GB, "a GPU")))


@pytest.mark.parametrize("cut", ["data.micro_batch_size_per_gpu=8", "data.use_dynamic_bsz=True"])
def test_a_reward_model_is_planned_with_full_micro_batches_however_few_prompts_a_step_has(cut):
    """A prompt has as many answers as were compared."""

    def planned(prompts):
        given = ["data.train_files=x", "model.path=y", "trainer.device=cuda", "trainer.n_gpus_per_node=1"]
        given += ["data.max_token_len_per_gpu=8192", "data.max_length=1024", cut, f"data.train_batch_size={prompts}"]
        config = load_config(None, given, check_files=False, root=RMConfig)
        return phase(supervised_memory_plan(config, SHAPE, None), "sft").parts

    assert planned(1) == planned(64)


def test_the_summary_of_a_plan_is_one_line_with_the_largest_phases():
    device = dict.fromkeys(DEVICE_PARTS, 0.0)
    host = dict.fromkeys(HOST_PARTS, 0.0)
    phases = (
        PhaseMemory("gen", "all", device | {"context": 3.0 * GB}, 8 * GB),
        PhaseMemory("update_actor", "all", device | {"context": 5.0 * GB}, 8 * GB),
        PhaseMemory("train", "host", host | {"processes": 2.5 * GB}),
    )
    expected = "Memory plan: up to 5.0 of 8.0 GB per device (update_actor), 2.5 GB per host (train)"
    assert MemoryPlan(phases, None).summary() == expected


def test_the_plan_of_a_run_on_this_machine_is_logged(tmp_path, caplog):
    folder = save_tiny_model(tmp_path)
    config = load(f"actor_rollout_ref.model.path={folder}", "trainer.device=cpu")
    with caplog.at_level(logging.INFO):
        plan = check_memory(config)
    assert caplog.messages.count(plan.summary()) == 1
    assert plan.render() not in caplog.messages
    config.trainer.console = "full"
    with caplog.at_level(logging.INFO):
        assert check_memory(config).render() == caplog.messages[-1]
    assert plan.device.kind == "cpu"
    assert plan.worst_phase.total < plan.device.total
    named = load("actor_rollout_ref.model.path=org/name", "trainer.device=cpu")
    assert check_memory(named) is None, "nothing is fetched for the plan's sake"
    assert check_memory(named, {"org/name": str(folder)}) is not None
    sft = load_config(
        None, ["data.train_files=x", f"model.path={folder}", "trainer.device=cpu"], check_files=False, root=SFTConfig
    )
    assert check_supervised_memory(sft) is not None
    assert tiny_config().hidden_size == ModelShape.from_folder(str(folder), config.actor_rollout_ref.model).hidden
