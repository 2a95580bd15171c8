"""MegatronModel: one rank's part of a model on Megatron-Core's layers; packed rows in, per-token fields out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn
from torch.nn.functional import gelu, silu

from verl.config.engine import RECOMPUTE, MegatronConfig
from verl.models.forward import (
    check_single_label,
    entropy_options,
    gather_row_values,
    label_statistics_fields,
    scatter_to_responses,
    top_token_fields,
)
from verl.models.fused_head import label_statistics
from verl.models.loading import ModelKind
from verl.models.logits import logit_adjustment, top_tokens, without_padded_rows
from verl.models.megatron_core import CoreArchitecture, padded_vocab
from verl.models.packing import PackedRows
from verl.workers.engine.common.routers import Routes
from verl.workers.engine.megatron.layers import (
    ColumnLinear,
    CoreConfig,
    Float32Router,
    GroupedExperts,
    Norm,
    PackedAttention,
    PackedTokens,
    RowLinear,
)
from verl.workers.engine.megatron.layout import CoreLayout
from verl.workers.engine.megatron.rotary import Rotary

_ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": partial(gelu, approximate="tanh")}


class MegatronModel(LanguageModule):
    """The layers of one (virtual) pipeline stage; the first stage has the embedding, the last stage has the head.

    Parameters have the names of Core's GPTModel; the head of a value model or classifier is `score`.
    """

    def __init__(
        self,
        config: CoreConfig,
        kind: ModelKind,
        hf_config: Any,
        layout: CoreLayout,
        device: torch.device,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.arch is not None
        check_single_label(kind, hf_config)
        arch = config.arch
        self.kind = kind
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.share_embeddings_and_output_weights = arch.tied and kind == "causal_lm"
        self._layout = layout
        self._vocab = arch.vocab
        self._adjust = logit_adjustment(hf_config)
        self._embedding_scale = arch.embedding_scale
        padded = padded_vocab(arch.vocab, layout.tp.size)
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config, padded, max_sequence_length=0, position_embedding_type="none"
            )
        self.rotary = Rotary(hf_config)
        config.softmax_scale = self.rotary.softmax_scale
        self.decoder = TransformerBlock(
            config=config,
            spec=_block_spec(config, vp_stage),
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=vp_stage,
        )
        if self.post_process and kind == "causal_lm":
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                arch.hidden,
                padded,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            )
        elif self.post_process:  # one value per token, for which half precision is too coarse
            self.score = nn.Linear(arch.hidden, 1, bias=kind == "value", dtype=torch.float32)
        self.to(device)
        if kind == "causal_lm" and (self.pre_process or self.post_process):
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: list[torch.Tensor]) -> None:
        """Set the output of the previous stage. Called by Core's schedules."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(
        self,
        rows: PackedRows,
        names: Sequence[str],
        shape: tuple[int, int],
        temperature: float,
        top_k: int = 0,
        routes: Routes | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the fields `names` as in `verl.models.forward.ResponseModel`; hidden states before the last stage."""
        hidden = None
        if self.pre_process:
            # Flattened and unsqueezed, for the strides of a layer's output: all layers then share one compiled graph.
            hidden = self.embedding(rows.input_ids, None).flatten(0, 1)[:, None]
            if self._embedding_scale != 1.0:
                hidden = hidden * torch.tensor(self._embedding_scale, dtype=hidden.dtype)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self.rotary(rows.position_ids, rows.packing.max_length),
            packed_seq_params=PackedTokens(rows.packing, routes),
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # The heads below return the gradient of all tokens on every rank.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self._fields(hidden.flatten(0, 1), rows, names, shape, temperature, top_k)

    def _fields(
        self,
        hidden: torch.Tensor,
        rows: PackedRows,
        names: Sequence[str],
        shape: tuple[int, int],
        temperature: float,
        top_k: int,
    ) -> dict[str, torch.Tensor]:
        fields: dict[str, torch.Tensor] = {}
        if self.kind == "causal_lm":
            per_token = self._token_fields(hidden.index_select(0, rows.before), rows, names, temperature, top_k)
        else:
            per_token = {"values": self._scores(hidden, rows.before)} if "values" in names else {}
            if "values" not in names or "last_value" in names:
                last = gather_row_values(self._scores(hidden, rows.last), rows)
                fields = {"last_value": last, "scores": last}
        fields |= {name: scatter_to_responses(value, rows, shape) for name, value in per_token.items() if name in names}
        return {name: fields[name] for name in names}

    def _token_fields(
        self, hidden: torch.Tensor, rows: PackedRows, names: Sequence[str], temperature: float, top_k: int
    ) -> dict[str, torch.Tensor]:
        """Return the fields of a causal LM; `hidden` [N, H] predicts the labels of `rows`."""
        weight = self.output_layer.weight
        if weight is None:
            weight = self.shared_embedding_or_output_weight()
        start = self._layout.tp.rank * len(weight)
        shared: dict[str, Any] = {
            "adjust": self._adjust,
            "vocab_group": self._layout.tp.group if self._layout.tp.size > 1 else None,
        }
        inputs = hidden, without_padded_rows(weight, start, self._vocab), rows.labels - start, temperature
        if top_k:
            return top_token_fields(top_tokens(*inputs, top_k, first=start, **shared))
        options: dict[str, Any] = {**shared, **entropy_options(names)}
        return label_statistics_fields(*label_statistics(*inputs, **options))

    def _scores(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.score(hidden.index_select(0, places).float()).squeeze(-1)


def core_config(
    arch: CoreArchitecture,
    engine: MegatronConfig,
    layout: CoreLayout,
    dtype: torch.dtype,
    checkpointing: bool | None,
    compiled: bool,
) -> CoreConfig:
    """Return Core's configuration of a model and layout, with `override_transformer_config` applied last.

    `checkpointing`: whether activations are recomputed unless the configuration specifies it; None: no training.
    `compiled`: use Core's functions that torch.compile fuses.
    """
    sizes = layout.sizes
    values: dict[str, Any] = {
        "arch": arch,
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "qk_layernorm": arch.qk_norm,
        "add_bias_linear": arch.linear_bias,
        "add_qkv_bias": arch.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[arch.activation],
        "bias_activation_fusion": compiled and arch.activation == "silu",
        "bias_dropout_fusion": compiled,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": bool(engine.sequence_parallel) and sizes.tensor > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # Weights are loaded afterwards; but Core marks tensor-parallel weights when it initialises them.
        "init_method": _no_init,
        "output_layer_init_method": _no_init,
        "embedding_init_method": _no_init,
        # With two stages, the interleaved schedule sends messages of both directions between the same two ranks. Core
        # distinguishes them only if their length is known and they are sent asynchronously.
        "variable_seq_lengths": layout.vpp == 1,
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        # Outputs that are sent asynchronously must not be freed before they arrive.
        "deallocate_pipeline_outputs": layout.vpp == 1,
        # Losses are divided by global counts: gradients are summed over ranks and micro-batches.
        "calculate_per_token_loss": True,
        "cp_comm_type": "a2a",
        # Core checks also for dense models that the dispatcher supports variable sequence lengths.
        "moe_token_dispatcher_type": "alltoall",
        **_moe_settings(arch),
    }
    values |= engine.override_transformer_config
    _check_names("override_transformer_config", values, CoreConfig)
    values = {name: value for name, value in values.items() if name not in RECOMPUTE}
    if checkpointing is not None:
        values |= engine.recompute(checkpointing)
    needs_te = sorted(set(values.get("recompute_modules") or ()) & {"layernorm", "moe_act"})
    if needs_te and find_spec("transformer_engine") is None:
        raise ValueError(
            f"megatron_config.override_transformer_config.recompute_modules: {needs_te[0]} requires Transformer "
            "Engine, which is not installed. Remove it."
        )
    return CoreConfig(**values)


def ddp_config(engine: MegatronConfig) -> DistributedDataParallelConfig:
    """Return Core's configuration of gradient buffers and reductions, with `override_ddp_config` applied last."""
    values = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": bool(engine.use_distributed_optimizer),
        **engine.override_ddp_config,
    }
    _check_names("override_ddp_config", values, DistributedDataParallelConfig)
    return DistributedDataParallelConfig(**values)


def _check_names(key: str, values: Mapping[str, Any], core: Any) -> None:
    unknown = sorted(set(values) - {field.name for field in fields(core)})
    if unknown:
        raise ValueError(f"megatron_config.{key}: Megatron-Core has no setting {unknown[0]!r}. Remove it.")


def _moe_settings(arch: CoreArchitecture) -> dict[str, Any]:
    """Return Core's settings for experts, without load balancing, which would change the policy."""
    experts = arch.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(sparse) for sparse in experts.layers],
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.shared_ffn > 0,
        # Normalised weights are a softmax over the selected experts; others are part of a softmax over all experts.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _no_init(weight: torch.Tensor) -> torch.Tensor:
    """Leave the weight uninitialised."""
    return weight


def _block_spec(config: CoreConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this stage."""
    assert config.arch is not None
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules([_layer_spec(config, first + index) for index in range(count)], Norm)


def _layer_spec(config: CoreConfig, number: int) -> ModuleSpec:
    """Return Core's layer with the replacements of `verl.workers.engine.megatron.layers`; `number` counts from 0."""
    assert config.arch is not None
    experts = config.num_moe_experts if config.arch.is_sparse(number) else None
    spec = get_gpt_layer_local_spec(experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = spec.submodules
    if experts is not None:
        parts.mlp.submodules.router = Float32Router
        parts.mlp.submodules.experts.module = GroupedExperts
    else:
        parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = ColumnLinear, RowLinear
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = ColumnLinear, RowLinear
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


def global_names(model: MegatronModel, layout: CoreLayout) -> dict[str, str]:
    """Return the name in the full model of each parameter: with global layer and expert indices."""
    first = model.decoder.layers[0].layer_number - 1 if model.decoder.layers else 0
    experts = model.config.arch.experts
    own_experts = experts.count // layout.ep.size if experts is not None else 0

    def global_name(name: str) -> str:
        name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda at: str(int(at[0]) + first), name)
        return re.sub(r"(?<=local_experts\.)\d+", lambda at: str(int(at[0]) + layout.ep.rank * own_experts), name)

    return {name: global_name(name) for name, _ in model.named_parameters()}
