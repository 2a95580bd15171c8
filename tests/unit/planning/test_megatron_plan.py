"""The memory plan on the megatron engine: parameters as Core divides them, laws of layouts, what ranks send."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from transformers import AutoConfig

from verl.config import ConfigError, PPOConfig, load_config
from verl.models.megatron_core import CoreArchitecture, weight_map
from verl.planning.check import check_memory
from verl.planning.megatron import MegatronModelMemory
from verl.planning.phases import GB, DeviceMemory
from verl.planning.plan import memory_plan
from verl.planning.shapes import CoreShape, MegatronLayout, ModelShape

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
SMALL |= {"intermediate_size": 128, "vocab_size": 1024}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "qwen2": AutoConfig.for_model("qwen2", **SMALL, tie_word_embeddings=False),
    "llama": AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True),
    "qwen3_moe": AutoConfig.for_model("qwen3_moe", **SMALL, **EXPERTS, head_dim=16, mlp_only_layers=[0]),
    "mixtral": AutoConfig.for_model("mixtral", **SMALL, num_local_experts=4),
}
LAYOUTS = {
    "one": MegatronLayout(world=1),
    "tp2 pp2": MegatronLayout(world=8, tp=2, pp=2, etp=2),
    "tp4 pp2 vpp2": MegatronLayout(world=8, tp=4, pp=2, vpp=2, etp=1, ep=2),
    "uneven": MegatronLayout(world=4, pp=4, first=1, last=3),
}
QWEN_7B = AutoConfig.for_model(
    "qwen2",
    **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
)
H100 = DeviceMemory("cuda", 80 * GB, "H100")


def model_of(config, sizes: MegatronLayout, **rest) -> MegatronModelMemory:
    shape = ModelShape.from_config(config)
    assert shape is not None
    assert shape.core is not None
    return MegatronModelMemory(shape=shape, core=shape.core, layout=sizes, **rest)


def counted(config, sizes: MegatronLayout) -> float:
    """Parameters on the fullest stage, added up from the table by which weights are loaded."""
    arch = CoreArchitecture.from_config(config)
    stages = sizes.stages(arch.layers)
    totals = [0.0] * sizes.pp
    for weight in weight_map(arch, "causal_lm"):
        if weight.copy_of and sizes.pp == 1:
            continue
        places = {"first": 0, "last": sizes.pp - 1}
        places |= {layer: stage for stage, chunks in enumerate(stages) for chunk in chunks for layer in chunk}
        ranks = sizes.tp if weight.expert is None else sizes.etp
        share = 1 if weight.expert is None else sizes.ep
        totals[places[weight.stage]] += math.prod(weight.shard_shape(ranks)) / share
    return max(totals)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_plan_counts_the_parameters_that_the_weight_map_places(family, layout):
    model = model_of(CONFIGS[family], LAYOUTS[layout])
    assert model.weights() == pytest.approx(2 * counted(CONFIGS[family], LAYOUTS[layout]), rel=1e-3)
    assert model.gradients() == 2 * model.weights()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_whole_model_has_the_parameters_that_transformers_counts(family):
    shape = ModelShape.from_config(CONFIGS[family])
    assert shape is not None
    assert CoreShape.from_architecture(CoreArchitecture.from_config(CONFIGS[family])).parameters == shape.parameters


def test_the_distributed_optimizer_divides_its_states_over_ranks_with_the_same_weights():
    sizes = MegatronLayout(world=16, tp=2, pp=2, cp=2, etp=1, ep=4)
    model = model_of(CONFIGS["qwen3_moe"], sizes)
    alone = replace(model, layout=replace(sizes, distributed_optimizer=False))
    assert sizes.copies == 4
    assert sizes.expert_copies == 2
    assert model.moments() < alone.moments() / 2
    assert alone.moments() == 12 * model.weights() / 2
    assert replace(alone, compute_bytes=4).moments() == 8 * model.weights() / 2


def test_a_pipeline_holds_the_micro_batches_of_its_schedule():
    plain, parts = MegatronLayout(world=4, pp=4), MegatronLayout(world=4, pp=4, vpp=2)
    assert [plain.in_flight(stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert plain.in_flight(0, 2) == 2, "no more than there are"
    assert [parts.in_flight(stage, 16) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]
    assert MegatronLayout(world=1).in_flight(0, 16) == 1
    assert plain.bubble(9) == 3 / 12 == 2 * parts.bubble(9) * 21 / 24


def test_layouts_and_recomputation_shrink_what_they_should():
    plain = model_of(QWEN_7B, MegatronLayout(world=8))

    def activations(model: MegatronModelMemory) -> float:
        return model.update(8192, 4096, 8)["activations"]

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    block = full | {"recompute_method": "block", "recompute_num_layers": 14}
    mlp = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    sizes = [activations(replace(plain, recompute=each)) for each in ({}, block, mlp, full)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 8
    tensor = replace(plain, layout=MegatronLayout(world=8, tp=4, etp=4))
    assert activations(tensor) == pytest.approx(activations(plain) / 4, rel=0.02)
    half = replace(tensor, layout=replace(tensor.layout, sequence_parallel=False))
    assert activations(tensor) < activations(half) < activations(plain)
    staged = replace(plain, layout=MegatronLayout(world=8, pp=4))
    assert activations(staged) == pytest.approx(activations(plain), rel=0.1), "a quarter of the layers, four passes"
    assert tensor.update(8192, 4096, 8)["gradients"] == pytest.approx(plain.gradients() / 4, rel=0.01)


def test_what_ranks_send_in_a_step():
    tokens, hidden, layers = 1000, 3584, 28
    unit = 2 * hidden * tokens
    sent = model_of(QWEN_7B, MegatronLayout(world=16, tp=4, pp=2, cp=2, etp=4)).communication(tokens)
    assert sent["tensor"] == pytest.approx(unit * 3 / 4 * 2 * (layers / 2) * 5)
    assert sent["pipeline"] == pytest.approx(2 * unit / 4)
    assert sent["context"] == pytest.approx(tokens * 2 * (2 * 3584 + 2 * 512) / 4 / 2 * (layers / 2) * 2)
    assert sent["expert"] == 0
    alone = model_of(QWEN_7B, MegatronLayout(world=8)).communication(tokens)
    assert alone["data"] == pytest.approx(6 * 7 / 8 * 7.6e9, rel=0.01)
    assert not any(alone[kind] for kind in ("tensor", "pipeline", "context", "expert"))


# ---------------------------------------------------------------- the plan of a run


def load(*overrides: str, gpus: int = 8) -> PPOConfig:
    given = [
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
        "trainer.device=cuda",
        "actor_rollout_ref=megatron",
    ]
    layout = [f"{ACTOR}.megatron_config.tensor_model_parallel_size=4"]
    return load_config(None, [*given, *layout, f"trainer.n_gpus_per_node={gpus}", *overrides], check_files=False)


def planned(*overrides: str):
    shape = ModelShape.from_config(QWEN_7B)
    assert shape is not None
    return memory_plan(load(*overrides), {"actor": shape, "critic": shape}, H100)


def test_every_phase_is_planned_with_a_critic_on_the_other_engine():
    plan = planned()
    assert [phase.phase for phase in plan.phases if not phase.on_host] == [
        *("gen", "old_log_prob", "values", "update_critic", "update_actor"),
    ]
    weights = 2 * 7.62e9 / 4 + 4 * 7.62e9 / 8  # the actor's in bfloat16 over TP 4, the critic's masters over FSDP 8
    assert plan.phase("update_actor").parts["weights"] == pytest.approx(weights, rel=0.05)
    assert plan.phase("gen").parts["gathered"] == 2 * 512 * 2**20


def test_unsharded_weights_that_megatron_bridge_converts_are_planned_in_a_weight_sync():
    """The embedding is whole on every rank, in bfloat16, and so is what it becomes."""
    bridged = planned(f"{ACTOR}.megatron_config.use_mbridge=True")
    more = bridged.phase("gen").parts["gathered"] - planned().phase("gen").parts["gathered"]
    assert more == 2 * 2 * 152064 * 3584
    assert bridged.phase("update_actor").parts == planned().phase("update_actor").parts


def test_offload_moves_each_kind_out_of_the_phases_of_others():
    megatron = f"{ACTOR}.megatron_config"
    here = planned().phase("update_critic").parts
    for key, part in (("param", "weights"), ("optimizer", "optimizer"), ("grad", "gradients")):
        away = planned(f"{megatron}.{key}_offload=True")
        assert away.phase("update_critic").parts[part] < here[part]
        assert away.phase("update_actor").parts[part] == planned().phase("update_actor").parts[part]


def test_a_model_that_core_cannot_express_is_refused_by_field(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", "hidden_size": 64}))
    with pytest.raises(ConfigError) as caught:
        check_memory(load(f"actor_rollout_ref.model.path={tmp_path}"), {})
    (problem,) = caught.value.problems
    assert problem.key == "actor_rollout_ref.model.path"
    assert "model_type is 'gemma2'" in problem.why
    assert "strategy=fsdp2" in problem.fix
