"""Rules of the megatron engine: parallel sizes and ranks, unsupported keys, fields of Megatron-Core's configurations,
divisibility of the model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.block_rules import is_installed
from verl.config.context_length import read_model_config
from verl.config.engine import RECOMPUTE, UNEVEN, MegatronConfig
from verl.config.layout import BLOCK_OF_ROLE, MODEL_OF_ROLE, ROUTER_REPLAY, active_roles, layout_of
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, divisors, near_values, show
from verl.config.schema import get_path, join

# Keys that determine the ranks of a pool.
_RANK_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes", "resource_pool_spec", "role_mapping")
# Fields of Core's configurations: keys of this engine, properties of the model, properties of the loss.
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
# Fields that users cannot override, by key of megatron_config: (fields, cause, remedy).
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
    """Return the roles on this engine. The reference is left out if its keys equal the actor's, so that problems are
    reported once."""
    roles = [role for role in active_roles(config) if role in BLOCK_OF_ROLE]
    roles = [role for role in roles if get_path(config, BLOCK_OF_ROLE[role]).strategy == "megatron"]
    actor, ref = (get_path(config, BLOCK_OF_ROLE[role]).megatron_config for role in ("actor", "ref"))
    return [role for role in roles if role != "ref" or "actor" not in roles or actor != ref]


def megatron_rules(config: PPOConfig, report: Report) -> None:
    """Report problems of all roles on this engine that do not depend on the model."""
    for role in roles_on_megatron(config):
        path, model, layout = BLOCK_OF_ROLE[role], MODEL_OF_ROLE[role], layout_of(config, role)
        lora = get_path(config, model).lora_rank if role in ("actor", "critic") else 0
        megatron_block_rules(
            path, get_path(config, path), (f"{model}.lora_rank", lora), (layout.world_size, layout.pool), report
        )


def megatron_block_rules(path: str, block: Any, lora: tuple[str, int], pool: tuple[int, str], report: Report) -> None:
    """Report problems of a role's configuration `block` at `path` that do not depend on the model.

    `lora`: key and value of the LoRA rank. `pool`: number of ranks and name of the resource pool.
    """
    megatron, at = block.megatron_config, join(path, "megatron_config")
    _unsupported_keys(path, block, lora, report)
    _expert_ranks(at, megatron, pool, report)
    _pipeline(at, megatron, report)
    _reserved_fields(at, megatron, report)
    _recompute(at, megatron, report)
    if megatron.use_dist_checkpointing and megatron.dist_checkpointing_path is None:
        why = f"{at}.use_dist_checkpointing = True loads the weights of a checkpoint"
        fix = "Set it to a …/global_step_N/actor, or leave use_dist_checkpointing out"
        report.problem(f"{at}.dist_checkpointing_path", None, why, fix)
    if megatron.use_mbridge and not is_installed("megatron.bridge"):
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


def _expert_ranks(block: str, megatron: MegatronConfig, pool: tuple[int, str], report: Report) -> None:
    """Report expert parallel sizes that do not divide the pool."""
    (world, name), stages = pool, megatron.pipeline_model_parallel_size
    expert, width = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or 1
    ranks = expert * width * stages
    # Otherwise experts are placed like other layers, whose ranks are checked elsewhere.
    placed_separately = expert > 1 or width != megatron.tensor_model_parallel_size
    if placed_separately and world % ranks:
        why = (
            f"the experts of a model copy take {ranks} ranks (expert {expert} × expert tensor {width} ×"
            f" pipeline {stages}), which does not divide the {world} ranks of {name}"
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


def _pipeline(block: str, megatron: MegatronConfig, report: Report) -> None:
    """Report virtual pipeline sizes without a pipeline, and invalid numbers of layers of the first and last stage."""
    parts, stages = megatron.virtual_pipeline_model_parallel_size or 1, megatron.pipeline_model_parallel_size
    if parts > 1 and stages == 1:
        why = f"there is one stage ({block}.pipeline_model_parallel_size = 1)"
        fix = "Set it to 1, or increase the stages"
        report.problem(f"{block}.virtual_pipeline_model_parallel_size", parts, why, fix)
    for name, layers in zip(UNEVEN, megatron.outer_stages(), strict=True):
        if layers is not None and (not isinstance(layers, int) or layers < 1 or layers % parts):
            why = f"must be a number of layers, at least 1 and a multiple of the {parts} chunks of a stage"
            report.problem(f"{block}.override_transformer_config.{name}", layers, why, "Correct it or leave it out")


def _reserved_fields(block: str, megatron: MegatronConfig, report: Report) -> None:
    """Report overrides of fields that are not the user's choice."""
    for key, rows in _RESERVED.items():
        for name, value in megatron[key].items():
            for names, why, fix in rows:
                if name in names and not (name in _RESERVED_VALUES and value == _RESERVED_VALUES[name]):
                    fields = {"block": block, "name": name}
                    report.problem(f"{block}.{key}.{name}", value, why.format(**fields), fix.format(**fields))


def _recompute(block: str, megatron: MegatronConfig, report: Report) -> None:
    """Report activation recomputation settings that contradict each other, and misspelt fields."""
    key, overrides = f"{block}.override_transformer_config", megatron.override_transformer_config
    for name in overrides:
        near = difflib.get_close_matches(name, (*RECOMPUTE, *UNEVEN), n=1, cutoff=0.8)
        if name not in (*RECOMPUTE, *UNEVEN) and near:
            report.problem(f"{key}.{name}", overrides[name], "is not a field of Core", f"Did you mean {near[0]}?")
    settings = megatron.recompute(checkpointing=True)
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


# Names of the number of experts in config.json.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields of Core with which the embedding or the loss counts as one layer when layers are split over stages.
_COUNTED_AS_LAYERS = {
    "account_for_embedding_in_pipeline_split": "the embedding",
    "account_for_loss_in_pipeline_split": "the loss",
}


@dataclass(frozen=True)
class ModelDimensions:
    """Dimensions of a model that must be divisible by parallel sizes."""

    layers: int
    heads: int
    kv_heads: int
    ffn: int
    """Columns of the MLP."""
    experts: int = 0
    moe_ffn: int = 0
    """Columns of the MLP of one expert."""

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
        for dimensions in _model_dimensions(config, role, folders or {}):
            block = f"{BLOCK_OF_ROLE[role]}.megatron_config"
            ParallelSizeCheck(
                block, get_path(config, block), dimensions, layout_of(config, role).world_size, report
            ).check()
    mode = get_path(config, ROUTER_REPLAY)
    if mode != "disabled" and not all(
        dimensions.experts for dimensions in _model_dimensions(config, "actor", folders or {})
    ):
        report.problem(ROUTER_REPLAY, mode, "the model has no experts", "Leave it out")


def _model_dimensions(config: PPOConfig, role: str, folders: Mapping[str, str]) -> list[ModelDimensions]:
    """Return the dimensions of a role's models whose config.json is available locally."""
    model = get_path(config, MODEL_OF_ROLE[role])
    names, changes = [config.reward_model.path if role == "reward_model" else model.path], model.override_config
    if role == "teacher":
        names, changes = [teacher.model_path for teacher in config.distillation.local_teachers.values()], {}
    configs = [read_model_config(folders.get(name, name), changes) for name in names if name]
    return [
        dimensions
        for item in configs
        if item is not None and (dimensions := ModelDimensions.from_config(item)) is not None
    ]


def check_model_layouts(config: PPOConfig, folders: Mapping[str, str]) -> None:
    """Raise ConfigError for sizes that do not divide a model, once it is downloaded. `folders`: see
    `model_layout_rules`."""
    report = Report()
    model_layout_rules(config, report, folders)
    report.raise_if_any()


def split_evenly(layers: int, stages: int, parts: int = 1) -> tuple[int, int] | None:
    """Return the layers of the first and last stage that make the other stages equal and the largest stage minimal.

    `parts`: number of interleaved chunks of a stage, which divides the layers of every stage. None: there is no such
    split.
    """
    middle_stages = stages - 2
    best: tuple[tuple[int, int, int], tuple[int, int]] | None = None
    for first in range(parts, layers, parts):
        for last in range(parts, layers - first + 1, parts):
            rest = layers - first - last
            if (rest == 0) != (middle_stages == 0) or (middle_stages and rest % (middle_stages * parts)):
                continue
            largest = max(first, last, rest // middle_stages if middle_stages else 0)
            rank = (largest, abs(first - last), last)
            if best is None or rank < best[0]:
                best = rank, (first, last)
    return None if best is None else best[1]


@dataclass(frozen=True)
class ParallelSizeCheck:
    """Checks that the parallel sizes of a role divide its model."""

    block: str
    megatron: MegatronConfig
    model: ModelDimensions
    world: int
    report: Report

    def check(self) -> None:
        """Add all problems to `report`."""
        self._check_tensor_size()
        self._check_context_size()
        self._check_pipeline_size()
        self._check_expert_sizes()

    def _report_problem(self, key: str, value: Any, why: str, valid_sizes: list[int], fix: str = "") -> None:
        """Report the invalid size `value`. `valid_sizes`: sizes that would work; `fix`: an alternative remedy."""
        near = f"Set it to {near_values(valid_sizes, value)}" if valid_sizes else ""
        fix = " or ".join(filter(None, (near, fix))) or "No size works with the other sizes: change them"
        self.report.problem(f"{self.block}.{key}", value, why, fix[0].upper() + fix[1:], _RANK_KEYS)

    def _sizes_that_fit(self, others: int, works: Callable[[int], bool]) -> list[int]:
        """Return the sizes that divide the pool together with `others` (a product of sizes) and satisfy `works`."""
        return [size for size in divisors(max(1, self.world // others)) if works(size)]

    def _check_tensor_size(self) -> None:
        model, size = self.model, self.megatron.tensor_model_parallel_size

        def uneven_parts(tp: int) -> list[str]:
            keys = 0 if tp % model.kv_heads == 0 else model.kv_heads  # ranks share key heads
            parts = {"attention heads": model.heads, "key heads": keys, "MLP columns": model.ffn}
            return [f"{number} {name}" for name, number in parts.items() if number % tp]

        uneven = uneven_parts(size)
        if uneven:
            others = self.megatron.pipeline_model_parallel_size * self.megatron.context_parallel_size
            valid_sizes = self._sizes_that_fit(others, lambda tp: not uneven_parts(tp))
            why = f"does not divide the model's {' and '.join(uneven)}"
            self._report_problem("tensor_model_parallel_size", size, why, valid_sizes)

    def _check_context_size(self) -> None:
        tensor, size = self.megatron.tensor_model_parallel_size, self.megatron.context_parallel_size
        if self.model.heads % tensor or (self.model.heads // tensor) % size == 0:
            return
        heads = self.model.heads // tensor
        valid_sizes = self._sizes_that_fit(
            tensor * self.megatron.pipeline_model_parallel_size, lambda cp: heads % cp == 0
        )
        why = f"does not divide the {heads} attention heads of a tensor rank"
        self._report_problem("context_parallel_size", size, why, valid_sizes)

    def _check_pipeline_size(self) -> None:
        layers, stages = self.model.layers, self.megatron.pipeline_model_parallel_size
        parts = self.megatron.virtual_pipeline_model_parallel_size or 1
        fixed = [number for number in self.megatron.outer_stages() if isinstance(number, int)]
        counted = [name for name in _COUNTED_AS_LAYERS if self.megatron.override_transformer_config.get(name)]
        remaining = layers + len(counted) - sum(fixed)  # for the stages whose size the user has not set

        def works(pp: int) -> bool:
            others = pp - len(fixed)
            if fixed and counted:  # rejected by Core
                return False
            if others <= 0 or remaining <= 0:
                return others == remaining == 0
            return remaining % (others * parts) == 0

        if stages == 1 or works(stages):
            return
        ranks_per_stage = self.megatron.tensor_model_parallel_size * self.megatron.context_parallel_size
        valid_sizes = self._sizes_that_fit(ranks_per_stage, lambda pp: pp > 1 and works(pp))
        chunks = f" × {parts} interleaved chunks" if parts > 1 else ""
        outer = f"the first or last stage's {' and '.join(map(str, fixed))}"
        why = f"{stages - len(fixed)} stages{chunks} do not divide {remaining} layers"
        if fixed and counted:
            why = f"{' and '.join(counted)} cannot be combined with {outer} layers"
        elif fixed:
            why += f" ({layers} without {outer})"
        elif counted:
            why += f" ({' and '.join([str(layers), *(_COUNTED_AS_LAYERS[name] for name in counted)])})"
        self._report_problem("pipeline_model_parallel_size", stages, why, valid_sizes, self._uneven_split(counted))

    def _uneven_split(self, counted: list[str]) -> str:
        """Return the remedy that sets the sizes of the outer stages, which Core rejects together with the fields
        `counted`; "" if no sizes work."""
        stages, parts = self.megatron.pipeline_model_parallel_size, self.megatron.virtual_pipeline_model_parallel_size
        split = split_evenly(self.model.layers, stages, parts or 1)
        if split is None:
            return ""
        overrides = " and ".join(f"{name}={size}" for name, size in zip(UNEVEN, split, strict=True))
        without = f", without {' and '.join(counted)}" if counted else ""
        return f"set {self.block}.override_transformer_config: {overrides}{without}"

    def _check_expert_sizes(self) -> None:
        model, size = self.model, self.megatron.expert_model_parallel_size
        width = self.megatron.expert_tensor_parallel_size or 1
        if not model.experts:
            if size > 1:
                self._report_problem("expert_model_parallel_size", size, "the model has no experts", [1])
            return
        if model.experts % size:
            valid_sizes = self._sizes_that_fit(
                width * self.megatron.pipeline_model_parallel_size, lambda ep: model.experts % ep == 0
            )
            self._report_problem(
                "expert_model_parallel_size", size, f"does not divide {model.experts} experts", valid_sizes
            )
        if model.moe_ffn % width:
            valid_sizes = self._sizes_that_fit(
                size * self.megatron.pipeline_model_parallel_size, lambda etp: model.moe_ffn % etp == 0
            )
            why = f"does not divide the {model.moe_ffn} columns of an expert"
            self._report_problem("expert_tensor_parallel_size", width, why, valid_sizes)
        if self.megatron.tensor_model_parallel_size > 1 and not self.megatron.sequence_parallel:
            why = "a model with experts requires it with tensor parallelism"
            self.report.problem(f"{self.block}.sequence_parallel", False, why, "Leave it out")
