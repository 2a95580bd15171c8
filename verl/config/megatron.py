"""Rules of the megatron engine: parallel sizes and ranks, unsupported keys, Core fields, divisibility of the model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.block_rules import is_installed
from verl.config.context_length import read_model_config
from verl.config.engine import RECOMPUTE, UNEVEN, MegatronConfig
from verl.config.layout import BLOCK_OF_ROLE, ROUTER_REPLAY, active_roles, layout_of
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, divisors, near_values, show
from verl.config.schema import get_path, join

# Keys that determine the ranks of a pool.
_RANK_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes", "resource_pool_spec", "role_mapping")
MODEL_OF_ROLE = {"critic": "critic.model", "reward_model": "reward_model.model"}
_POLICY_MODEL = "actor_rollout_ref.model"
_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
)
_SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "gated_linear_unit", "activation_func"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_router_pre_softmax", "moe_router_score_function"),
)
_LOSS_FIELDS = (
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_router_enable_expert_bias"),
    *("moe_expert_capacity_factor", "mtp_num_layers", "calculate_per_token_loss"),
)
# Fields of Core's configurations that users cannot override: (fields, cause, remedy).
_RESERVED: dict[str, tuple[tuple[tuple[str, ...], str, str], ...]] = {
    "override_transformer_config": (
        (_SIZES, "is a key of this engine", "Set {block}.{name}"),
        (("bf16", "fp16", "params_dtype", "pipeline_dtype"), "it follows from {block}.dtype", "Set {block}.dtype"),
        (_SHAPE, "it follows from the model's config.json", "Leave it out, or set it in the model's override_config"),
        (("hidden_dropout", "attention_dropout"), "dropout is disabled", "Leave it out"),
        (_LOSS_FIELDS, "only the loss of the policy or critic is trained", "Leave it out"),
        (
            ("variable_seq_lengths", "pipeline_model_parallel_layout"),
            "the engine sets it",
            f"Leave it out; uneven pipelines: {' and '.join(UNEVEN)}",
        ),
    ),
    "override_ddp_config": (
        (("use_distributed_optimizer",), "is a key of this engine", "Set {block}.{name}"),
        (("grad_reduce_in_fp32",), "gradients are always accumulated in float32", "Leave it out"),
        (
            ("average_in_collective", "gradient_reduce_div_fusion"),
            "losses are divided by the counts of the whole step, so gradients are summed",
            "Leave it out",
        ),
        (
            ("check_for_nan_in_grad", "check_for_large_grads"),
            "steps with such gradients are skipped and counted",
            "Leave it out",
        ),
        (
            ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather"),
            "gradients are reduced once per optimizer step, not in each backward pass",
            "Leave it out",
        ),
        (("num_distributed_optimizer_instances",), "all data-parallel ranks share one optimizer", "Leave it out"),
        (("use_megatron_fsdp", "use_custom_fsdp"), "is another engine", "Set strategy=fsdp2"),
    ),
}
# Values that the engine uses anyway and that are therefore accepted.
_RESERVED_VALUES = {
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0),
    "grad_reduce_in_fp32": True,
    "average_in_collective": False,
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "align_param_gather"), False),
    **dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp"), False),
}


def roles_on_megatron(config: PPOConfig) -> list[str]:
    """Return the roles on this engine, without a reference that has the same keys as the actor."""
    roles = [role for role in active_roles(config) if role in BLOCK_OF_ROLE]
    roles = [role for role in roles if get_path(config, BLOCK_OF_ROLE[role]).strategy == "megatron"]
    actor, ref = (get_path(config, BLOCK_OF_ROLE[role]).megatron_config for role in ("actor", "ref"))
    return [role for role in roles if role != "ref" or "actor" not in roles or actor != ref]


def megatron_rules(config: PPOConfig, report: Report) -> None:
    """Report problems of all roles on this engine that do not depend on the model."""
    for role in roles_on_megatron(config):
        path, model, layout = BLOCK_OF_ROLE[role], MODEL_OF_ROLE.get(role, _POLICY_MODEL), layout_of(config, role)
        lora = get_path(config, model).lora_rank if role in ("actor", "critic") else 0
        block_rules(
            path, get_path(config, path), (f"{model}.lora_rank", lora), (layout.world_size, layout.pool), report
        )


def block_rules(path: str, block: Any, lora: tuple[str, int], pool: tuple[int, str], report: Report) -> None:
    """Report problems of the block at `path`. `lora`: key and value of the LoRA rank; `pool`: ranks and name."""
    sizes, at = block.megatron_config, join(path, "megatron_config")
    _unsupported_keys(path, block, lora, report)
    _expert_ranks(at, sizes, pool, report)
    _pipeline(at, sizes, report)
    _reserved_fields(at, sizes, report)
    _recompute(at, sizes, report)
    if sizes.use_dist_checkpointing and sizes.dist_checkpointing_path is None:
        why = f"{at}.use_dist_checkpointing = True loads the weights of a checkpoint"
        fix = "Set it to a …/global_step_N/actor, or leave use_dist_checkpointing out"
        report.problem(f"{at}.dist_checkpointing_path", None, why, fix)
    if sizes.use_mbridge and not is_installed("megatron.bridge"):
        report.notice("megatron_config.use_mbridge: megatron-bridge is not installed; the built-in mapping is used.")


def _unsupported_keys(path: str, block: Any, lora: tuple[str, int], report: Report) -> None:
    """Report keys that this engine does not support and that would change the training."""
    strategy = join(path, "strategy")
    size = block.ulysses_sequence_parallel_size
    if size > 1:
        why = f"{strategy} = megatron uses context_parallel_size instead"
        fix = f"Set {join(path, 'megatron_config')}.context_parallel_size={size} instead"
        report.problem(join(path, "ulysses_sequence_parallel_size"), size, why, fix, (strategy,))
    if block.use_prefix_grouper == "true":
        why = f"{strategy} = megatron computes the attention of whole rows only"
        fix = f"Set it to auto or False, or {strategy}=fsdp2"
        report.problem(join(path, "use_prefix_grouper"), True, why, fix, (strategy,))
    key, rank = lora
    if rank:
        why, fix = f"{strategy} = megatron does not support LoRA", f"Set it to 0, or {strategy}=fsdp2"
        report.problem(key, rank, why, fix, (strategy,))
    if "optim" in block and block.optim.state_dtype != "fp32":
        why = f"{strategy} = megatron keeps optimizer moments in float32"
        fix = f"Leave it out; {join(path, 'megatron_config')}.optimizer_offload=True saves more"
        report.problem(join(path, "optim.state_dtype"), block.optim.state_dtype, why, fix, (strategy,))


def _expert_ranks(block: str, sizes: MegatronConfig, pool: tuple[int, str], report: Report) -> None:
    """Report expert parallel sizes that do not divide the pool."""
    (world, name), stages = pool, sizes.pipeline_model_parallel_size
    expert, width = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or 1
    ranks = expert * width * stages
    # Otherwise experts are placed like other layers, whose ranks are checked elsewhere.
    placed_separately = expert > 1 or width != sizes.tensor_model_parallel_size
    if placed_separately and world % ranks:
        why = (
            f"the experts of a copy take {ranks} ranks (expert {expert} × expert tensor {width} × pipeline {stages}),"
            f" which does not divide the {world} ranks of {name}"
        )
        stage_ranks = world // stages if world % stages == 0 else 0
        valid_sizes = divisors(stage_ranks // width) if stage_ranks % width == 0 else []
        fix = (
            f"Set it to {near_values(valid_sizes, expert)}"
            if valid_sizes
            else f"Set {block}.expert_tensor_parallel_size=1"
        )
        sizes_used = tuple(f"{block}.{key}" for key in ("pipeline_model_parallel_size", "expert_tensor_parallel_size"))
        report.problem(f"{block}.expert_model_parallel_size", expert, why, fix, (*_RANK_KEYS, *sizes_used))


def _pipeline(block: str, sizes: MegatronConfig, report: Report) -> None:
    parts, stages = sizes.virtual_pipeline_model_parallel_size or 1, sizes.pipeline_model_parallel_size
    if parts > 1 and stages == 1:
        why = f"there is one stage ({block}.pipeline_model_parallel_size = 1)"
        fix = "Set it to 1, or increase the stages"
        report.problem(f"{block}.virtual_pipeline_model_parallel_size", parts, why, fix)
    for name, layers in zip(UNEVEN, sizes.outer_stages(), strict=True):
        if layers is not None and (not isinstance(layers, int) or layers < 1 or layers % parts):
            why = f"must be a number of layers, at least 1 and a multiple of the {parts} chunks of a stage"
            report.problem(f"{block}.override_transformer_config.{name}", layers, why, "Correct it or leave it out")


def _reserved_fields(block: str, sizes: MegatronConfig, report: Report) -> None:
    for key, rows in _RESERVED.items():
        for name, value in sizes[key].items():
            for names, why, fix in rows:
                if name in names and not (name in _RESERVED_VALUES and value == _RESERVED_VALUES[name]):
                    fields = {"block": block, "name": name}
                    report.problem(f"{block}.{key}.{name}", value, why.format(**fields), fix.format(**fields))


def _recompute(block: str, sizes: MegatronConfig, report: Report) -> None:
    key, overrides = f"{block}.override_transformer_config", sizes.override_transformer_config
    for name in overrides:
        near = difflib.get_close_matches(name, (*RECOMPUTE, *UNEVEN), n=1, cutoff=0.8)
        if name not in (*RECOMPUTE, *UNEVEN) and near:
            report.problem(f"{key}.{name}", overrides[name], "is not a field of Core", f"Did you mean {near[0]}?")
    settings = sizes.recompute(checkpointing=True)
    granularity = settings.get("recompute_granularity")
    choices: dict[str, tuple[Any, ...]] = {
        "recompute_granularity": ("full", "selective", None),
        "recompute_method": ("uniform", "block") if granularity == "full" else (None,),
    }
    for name, known in choices.items():
        if name in overrides and overrides[name] not in known:
            fix = f"Set {' or '.join(map(show, known))}"
            report.problem(
                f"{key}.{name}",
                overrides[name],
                f"is not supported with recompute_granularity {show(granularity)}",
                fix,
            )
    if granularity != "full" and overrides.get("recompute_num_layers") is not None:
        why = f"requires recompute_granularity = full, not {show(granularity)}"
        report.problem(
            f"{key}.recompute_num_layers", overrides["recompute_num_layers"], why, "Leave it out, or set full"
        )
    if granularity != "selective" and overrides.get("recompute_modules") is not None:
        why, fix = "requires recompute_granularity = selective", "Leave it out, or set recompute_granularity"
        report.problem(f"{key}.recompute_modules", overrides["recompute_modules"], why, fix)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields of Core: embedding and loss count as a layer each.
_COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True)
class ModelDimensions:
    """Dimensions of a model that must be divisible by parallel sizes."""

    layers: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int = 0
    moe_ffn: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDimensions | None:
        """Read a config.json; None if a field is missing."""
        text = config.get("text_config") or config
        names = ("num_hidden_layers", "num_attention_heads", "intermediate_size")
        values: list[Any] = [text.get(name) for name in names]
        if not all(isinstance(value, int) for value in values):
            return None
        layers, heads, ffn = values
        experts = next((text[name] for name in _EXPERTS if text.get(name)), 0)
        kv_heads = text.get("num_key_value_heads") or heads
        return cls(layers, heads, kv_heads, ffn, experts, (text.get("moe_intermediate_size") or ffn) if experts else 0)


def model_layout_rules(config: PPOConfig, report: Report, folders: Mapping[str, str] | None = None) -> None:
    """Report parallel sizes that do not divide the model of a role; `folders`: local folders of hub names and URLs."""
    for role in roles_on_megatron(config):
        for shape in _models(config, role, folders or {}):
            block = f"{BLOCK_OF_ROLE[role]}.megatron_config"
            ParallelSizeCheck(block, get_path(config, block), shape, layout_of(config, role).world_size, report).check()
    mode = get_path(config, ROUTER_REPLAY)
    if mode != "disabled" and not all(shape.experts for shape in _models(config, "actor", folders or {})):
        report.problem(ROUTER_REPLAY, mode, "the model has no experts", "Leave it out")


def _models(config: PPOConfig, role: str, folders: Mapping[str, str]) -> list[ModelDimensions]:
    """Return the shapes of a role's models whose config.json is available locally."""
    model = get_path(config, MODEL_OF_ROLE.get(role, "actor_rollout_ref.model"))
    names, changes = [config.reward_model.path if role == "reward_model" else model.path], model.override_config
    if role == "teacher":
        names, changes = [teacher.model_path for teacher in config.distillation.local_teachers.values()], {}
    configs = [read_model_config(folders.get(name, name), changes) for name in names if name]
    return [shape for item in configs if item is not None and (shape := ModelDimensions.from_config(item)) is not None]


def check_model_layouts(config: PPOConfig, folders: Mapping[str, str]) -> None:
    """Raise ConfigError for sizes that do not divide the downloaded models in `folders`."""
    report = Report()
    model_layout_rules(config, report, folders)
    report.raise_if_any()


def split_evenly(layers: int, stages: int, parts: int = 1) -> tuple[int, int] | None:
    """Return the layers of the first and last stage that make the other stages equal and the largest stage minimal.

    None if there is no such split.
    """
    between = stages - 2
    best: tuple[tuple[int, int, int], tuple[int, int]] | None = None
    for first in range(parts, layers, parts):
        for last in range(parts, layers - first + 1, parts):
            rest = layers - first - last
            if (rest == 0) != (between == 0) or (between and rest % (between * parts)):
                continue
            largest = max(first, last, rest // between if between else 0)
            rank = (largest, abs(first - last), last)
            if best is None or rank < best[0]:
                best = rank, (first, last)
    return None if best is None else best[1]


@dataclass(frozen=True)
class ParallelSizeCheck:
    """Checks that the parallel sizes of a role divide its model."""

    block: str
    sizes: MegatronConfig
    model: ModelDimensions
    world: int
    report: Report

    def check(self) -> None:
        self._tensor()
        self._context()
        self._layers()
        self._experts()

    def _problem(self, key: str, value: Any, why: str, valid_sizes: list[int], fix: str = "") -> None:
        """Report a size; `valid_sizes`: sizes that would work, `fix`: an alternative remedy."""
        near = f"Set it to {near_values(valid_sizes, value)}" if valid_sizes else ""
        fix = " or ".join(filter(None, (near, fix))) or "No size works with the other sizes: change them"
        self.report.problem(f"{self.block}.{key}", value, why, fix[0].upper() + fix[1:], _RANK_KEYS)

    def _sizes_that_fit(self, others: int, works: Callable[[int], bool]) -> list[int]:
        """Return the sizes that divide the pool together with `others` (a product of sizes) and satisfy `works`."""
        return [size for size in divisors(max(1, self.world // others)) if works(size)]

    def _tensor(self) -> None:
        model, size = self.model, self.sizes.tensor_model_parallel_size

        def uneven_parts(tp: int) -> list[str]:
            keys = 0 if tp % model.kv_heads == 0 else model.kv_heads  # ranks share key heads
            parts = {"attention heads": model.heads, "key heads": keys, "MLP columns": model.ffn}
            return [f"{number} {name}" for name, number in parts.items() if number % tp]

        uneven = uneven_parts(size)
        if uneven:
            others = self.sizes.pipeline_model_parallel_size * self.sizes.context_parallel_size
            valid_sizes = self._sizes_that_fit(others, lambda tp: not uneven_parts(tp))
            why = f"does not divide the model's {' and '.join(uneven)}"
            self._problem("tensor_model_parallel_size", size, why, valid_sizes)

    def _context(self) -> None:
        tensor, size = self.sizes.tensor_model_parallel_size, self.sizes.context_parallel_size
        if self.model.heads % tensor or (self.model.heads // tensor) % size == 0:
            return
        heads = self.model.heads // tensor
        valid_sizes = self._sizes_that_fit(tensor * self.sizes.pipeline_model_parallel_size, lambda cp: heads % cp == 0)
        why = f"does not divide the {heads} attention heads of a tensor rank"
        self._problem("context_parallel_size", size, why, valid_sizes)

    def _layers(self) -> None:
        layers, stages = self.model.layers, self.sizes.pipeline_model_parallel_size
        parts = self.sizes.virtual_pipeline_model_parallel_size or 1
        fixed = [number for number in self.sizes.outer_stages() if isinstance(number, int)]
        ends = sum(bool(self.sizes.override_transformer_config.get(name)) for name in _COUNTED_AS_LAYERS)
        remaining, others = layers + ends - sum(fixed), stages - len(fixed)
        divides = others > 0 and remaining > 0 and remaining % (others * parts) == 0
        if stages == 1 or (remaining == 0 and others == 0) or divides:
            return
        ranks_per_stage = self.sizes.tensor_model_parallel_size * self.sizes.context_parallel_size
        valid_sizes = self._sizes_that_fit(ranks_per_stage, lambda pp: pp > 1 and layers % (pp * parts) == 0)
        split = split_evenly(layers, stages, parts)
        overrides = "" if split is None else " and ".join(f"{n}={v}" for n, v in zip(UNEVEN, split, strict=True))
        fix = overrides and f"set {self.block}.override_transformer_config: {overrides}"
        chunks = f" × {parts} interleaved chunks" if parts > 1 else ""
        placed = f" (of the model's {layers}, {' and '.join(map(str, fixed))} placed)" if fixed else ""
        why = f"{others} stages{chunks} do not divide {remaining} layers{placed}"
        self._problem("pipeline_model_parallel_size", stages, why, valid_sizes, fix)

    def _experts(self) -> None:
        model, size = self.model, self.sizes.expert_model_parallel_size
        width = self.sizes.expert_tensor_parallel_size or 1
        if not model.experts:
            if size > 1:
                self._problem("expert_model_parallel_size", size, "the model has no experts", [1])
            return
        if model.experts % size:
            valid_sizes = self._sizes_that_fit(
                width * self.sizes.pipeline_model_parallel_size, lambda ep: model.experts % ep == 0
            )
            self._problem("expert_model_parallel_size", size, f"does not divide {model.experts} experts", valid_sizes)
        if model.moe_ffn % width:
            valid_sizes = self._sizes_that_fit(
                size * self.sizes.pipeline_model_parallel_size, lambda etp: model.moe_ffn % etp == 0
            )
            why = f"does not divide the {model.moe_ffn} columns of an expert"
            self._problem("expert_tensor_parallel_size", width, why, valid_sizes)
        if self.sizes.tensor_model_parallel_size > 1 and not self.sizes.sequence_parallel:
            why = "a model with experts requires it with tensor parallelism"
            self.report.problem(f"{self.block}.sequence_parallel", False, why, "Leave it out")
