"""Shapes of models, read from models on the meta device, and how the megatron engine distributes them over ranks.

Modules that import torch are imported where a model is built: plans of known shapes need none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from verl.config.context_length import context_limit
from verl.config.engine import MegatronConfig
from verl.models.megatron_core import CoreArchitecture
from verl.models.prefix_support import sharing_obstacle
from verl.utils.buffer_sizes import inner_size

if TYPE_CHECKING:
    from verl.models.loading import ModelKind


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one transformer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """MLP width per token; the sum over its experts in a mixture of experts."""
    vocab: int
    tied: bool
    """Whether the head shares the weight of the embedding."""
    layer_parameters: int
    """Parameters of all layers."""
    root_parameters: int
    """Parameters outside the layers (embeddings, head), which stay gathered during a whole pass."""
    largest_parameters: int
    """Parameters of the largest tensor: an embedding, or all experts of a layer."""
    adapter_parameters: int | None = None
    """LoRA parameters; None without LoRA."""
    gated: bool = True
    """Whether the MLP multiplies two projections."""
    norms_per_layer: int = 2
    norm_in_float32: bool = False
    """Whether the weight of a norm is applied before the cast back to half precision (Gemma)."""
    head_norms: bool = False
    """Whether queries and keys are normalised (Qwen3)."""
    core: CoreShape | None = None
    """Shape for the megatron engine; None if it does not support the model."""
    positions: int | None = None
    """Maximum sequence length; None: unknown."""
    sharing_obstacle: str | None = None
    """Why the fsdp engine cannot share prefixes of a micro-batch on a GPU; None: it can."""

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.root_parameters

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: str, model_config: Any, kind: ModelKind = "causal_lm") -> ModelShape | None:
        """Return the shape of the model in a local folder, with the overrides and adapters of `model_config`; None if
        its config lacks the usual fields."""
        import torch

        from verl.models.loading import empty_model, read_config
        from verl.models.lora import adapter_parameters

        trusted = model_config.trust_remote_code
        config = read_config(folder, trusted, model_config.override_config)
        shape = cls.from_config(config, kind, trusted)
        rank = model_config["lora_rank"] if "lora_rank" in model_config else 0
        if shape is None or not rank:
            return shape
        model = empty_model(config, kind, torch.bfloat16, trusted)
        return replace(shape, adapter_parameters=adapter_parameters(model, kind, model_config))

    @classmethod
    def from_config(cls, config: Any, kind: ModelKind = "causal_lm", trusted: bool = False) -> ModelShape | None:
        """Return the shape of the model that transformers builds from a config; None if usual fields are missing."""
        import torch

        from verl.models.loading import empty_model, outermost_layers

        text = config.get_text_config()
        if not all(hasattr(text, name) for name in ("hidden_size", "num_attention_heads", "vocab_size")):
            return None
        model = empty_model(config, kind, torch.bfloat16, trusted)
        layers = outermost_layers(model)
        norms = [part.weight.numel() for part in layers[0].modules() if "Norm" in type(part).__name__]
        layer_parameters = sum(value.numel() for layer in layers for value in layer.parameters())
        sizes = [value.numel() for value in model.parameters()]
        hidden, heads = text.hidden_size, text.num_attention_heads
        return cls(
            hidden=hidden,
            layers=len(layers),
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            intermediate=inner_size(text),
            vocab=text.vocab_size,
            tied=bool(text.tie_word_embeddings),
            layer_parameters=layer_parameters,
            root_parameters=sum(sizes) - layer_parameters,
            largest_parameters=max(sizes),
            gated=any("gate" in name for name, _ in layers[0].named_modules()),
            norms_per_layer=norms.count(hidden),
            norm_in_float32=text.model_type.startswith("gemma"),
            head_norms=any(size != hidden for size in norms),
            core=_core_shape(text),
            positions=context_limit(text.to_dict()),
            sharing_obstacle=sharing_obstacle(text),
        )


def _core_shape(config: Any) -> CoreShape | None:
    """Return the shape for the megatron engine; None if the engine does not support the model."""
    try:
        return CoreShape.from_architecture(CoreArchitecture.from_config(config))
    except ValueError:  # `planning.check` reports the cause if the run uses the megatron engine
        return None


# ---------------------------------------------------------------- megatron engine


@dataclass(frozen=True)
class CoreShape:
    """Sizes of one transformer that the megatron engine divides over ranks."""

    layers: int
    hidden: int
    heads: int
    query_width: int
    key_width: int
    ffn: int
    vocab: int
    tied: bool
    attention: int
    """Attention parameters of a layer, which are divided over tensor-parallel ranks."""
    replicated: int
    """Parameters of a layer that every tensor-parallel rank has: norms and the bias of the output projection."""
    head_norms: bool = False
    sparse: tuple[bool, ...] = ()
    """Whether each layer has experts; empty: none has."""
    experts: int = 0
    """Experts per layer."""
    per_token: int = 0
    """Experts that each token is sent to."""
    expert_ffn: int = 0
    """MLP width of one expert."""
    shared_ffn: int = 0
    """MLP width of the shared expert; 0: none."""

    @classmethod
    def from_architecture(cls, arch: CoreArchitecture) -> CoreShape:
        query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        qkv_rows = query + 2 * key
        bias = qkv_rows if arch.qkv_bias else 0
        output_bias = arch.hidden if arch.linear_bias else 0
        experts = arch.experts
        return cls(
            layers=arch.layers,
            hidden=arch.hidden,
            heads=arch.heads,
            query_width=query,
            key_width=key,
            ffn=arch.ffn,
            vocab=arch.vocab,
            tied=arch.tied,
            attention=(qkv_rows + query) * arch.hidden + bias,
            replicated=2 * arch.hidden + output_bias + (2 * arch.head_dim if arch.qk_norm else 0),
            head_norms=arch.qk_norm,
            sparse=experts.layers if experts else (),
            experts=experts.count if experts else 0,
            per_token=experts.per_token if experts else 0,
            expert_ffn=experts.ffn if experts else 0,
            shared_ffn=experts.shared_ffn if experts else 0,
        )

    def is_sparse(self, layer: int) -> bool:
        return bool(self.sparse) and self.sparse[layer]

    @property
    def parameters(self) -> int:
        """Parameters of the whole causal LM."""
        single_rank = MegatronLayout(world=1)
        layers = sum(sum(self.layer_parameters(layer, single_rank)) for layer in range(self.layers))
        return int(layers) + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    def layer_parameters(self, layer: int, layout: MegatronLayout) -> tuple[float, float]:
        """Return the parameters of a layer on one rank: outside the experts, and of its experts."""
        dense = self.attention / layout.tp + self.replicated
        if not self.is_sparse(layer):
            return dense + 3 * self.hidden * self.ffn / layout.tp, 0.0
        gate = self.hidden if self.shared_ffn else 0
        dense += self.experts * self.hidden + gate + 3 * self.hidden * self.shared_ffn / layout.tp
        return dense, 3 * self.hidden * self.expert_ffn * self.experts / (layout.ep * layout.etp)


@dataclass(frozen=True)
class MegatronLayout:
    """Parallel sizes of a model on the megatron engine."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Chunks of layers per pipeline stage (interleaved schedule)."""
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    first: int | None = None
    """Layers of the first pipeline stage; None: as many as the others."""
    last: int | None = None
    """Layers of the last pipeline stage; None: as many as the others."""
    embedding_counts: bool = False
    """Whether the embedding counts as a layer of the first stage."""
    loss_counts: bool = False
    """Whether the loss counts as a layer of the last stage."""

    @classmethod
    def from_config(cls, config: MegatronConfig, world: int) -> MegatronLayout:
        first, last = config.outer_stages()
        overrides = config.override_transformer_config
        return cls(
            world=world,
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            vpp=config.virtual_pipeline_model_parallel_size or 1,
            cp=config.context_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
            sequence_parallel=config.sequence_parallel,
            distributed_optimizer=config.use_distributed_optimizer,
            first=first,
            last=last,
            embedding_counts=bool(overrides.get("account_for_embedding_in_pipeline_split")),
            loss_counts=bool(overrides.get("account_for_loss_in_pipeline_split")),
        )

    @property
    def dp(self) -> int:
        return max(1, self.world // (self.tp * self.pp * self.cp))

    @property
    def copies(self) -> int:
        """Number of ranks with the same weights outside the experts."""
        return self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        """Number of ranks with the same experts."""
        return max(1, self.world // (self.etp * self.ep * self.pp))

    @property
    def token_ranks(self) -> int:
        """Number of ranks over which the tokens between layers are divided, in addition to context parallelism."""
        return self.tp if self.sequence_parallel else 1

    def stages(self, layers: int) -> list[list[range]]:
        """Return the layers of each stage and chunk: `[stage][chunk]`."""
        return stage_layers(
            layers,
            self.pp,
            self.vpp,
            first=self.first,
            last=self.last,
            embedding_counts=self.embedding_counts,
            loss_counts=self.loss_counts,
        )

    def in_flight(self, stage: int, micro_batches: int) -> float:
        """Return the maximum number of micro-batches whose activations a stage holds, by the 1F1B schedule.

        With several chunks per stage it is a fraction, because micro-batches may be in only some of them (Narayanan et
        al., arXiv 2104.04473).
        """
        if self.vpp == 1:
            return min(micro_batches, self.pp - stage)
        warm_up = 2 * (self.pp - stage - 1) + (self.vpp - 1) * self.pp + 1
        return min(micro_batches * self.vpp, warm_up) / self.vpp

    def bubble(self, micro_batches: int) -> float:
        """Fraction of a step in which a stage is idle."""
        return (self.pp - 1) / (self.vpp * micro_batches + self.pp - 1)


_UNEVEN_KEYS = "override_transformer_config.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"


def stage_layers(
    layers: int,
    pp: int,
    vpp: int | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> list[list[range]]:
    """Return the layers of each pipeline stage and chunk as Megatron-Core assigns them: `[stage][chunk]`.

    `vpp`: chunks per stage (interleaved schedule). `first`, `last`: number of layers of the first and last stage, if it
    differs from the others. `embedding_counts`, `loss_counts`: the embedding or the loss counts as a layer.
    """
    chunks = vpp or 1
    counted = [name for name, counts in (("the embedding", embedding_counts), ("the loss", loss_counts)) if counts]
    if chunks > 1 and pp == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size: {vpp} requires several pipeline stages, but "
            "pipeline_model_parallel_size is 1. Leave it out, or use more stages."
        )
    if pp > 1 and (first is not None or last is not None):
        if embedding_counts or loss_counts:
            raise ValueError(
                f"{_UNEVEN_KEYS}: incompatible with account_for_embedding_in_pipeline_split and "
                "account_for_loss_in_pipeline_split. Set one or the other."
            )
        counts = _uneven_stages(layers, pp, first, last)
    else:
        counts = [_layers_per_stage(layers, counted, pp)] * pp
    sizes = [[_layers_per_chunk(count, counted, chunks)] * chunks for count in counts]
    sizes[0][0] -= embedding_counts
    sizes[-1][-1] -= loss_counts
    if min(map(min, sizes)) < 0:
        raise ValueError(
            f"pipeline_model_parallel_size: {layers} layers are too few for {pp} stages of {chunks} chunks."
            " Use fewer stages or chunks."
        )
    ends = accumulate((sizes[stage][chunk] for chunk in range(chunks) for stage in range(pp)), initial=0)
    ranges = [range(start, stop) for start, stop in pairwise(ends)]
    return [[ranges[chunk * pp + stage] for chunk in range(chunks)] for stage in range(pp)]


def _uneven_stages(layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    others = pp - (first is not None) - (last is not None)
    remaining = layers - (first or 0) - (last or 0)
    if remaining < 0 or (remaining % others if others else remaining):
        raise ValueError(
            f"{_UNEVEN_KEYS}: {first} and {last} leave {remaining} of {layers} layers, which cannot be divided evenly "
            f"over {others} other stages. Change one of these numbers."
        )
    middle = [remaining // others] * others if others else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def _layers_per_stage(layers: int, counted: list[str], pp: int) -> int:
    """`counted`: what counts as a layer in addition to the layers of the model."""
    total = layers + len(counted)
    if total % pp:
        divisors = [size for size in range(1, total + 1) if total % size == 0]
        sum_text = f" ({' and '.join([str(layers), *counted])})" if counted else ""
        instead = " instead of account_for_*_in_pipeline_split" if counted else ""
        raise ValueError(
            f"pipeline_model_parallel_size: {pp} does not divide the {total} layers{sum_text}. Use one of {divisors}, "
            f"or set {_UNEVEN_KEYS}{instead}."
        )
    return total // pp


def _layers_per_chunk(layers: int, counted: list[str], chunks: int) -> int:
    if layers % chunks:
        note = f" (including {' and '.join(counted)})" if counted else ""
        raise ValueError(
            f"virtual_pipeline_model_parallel_size: {chunks} does not divide the {layers} layers of a stage{note}."
            " Use a divisor."
        )
    return layers // chunks
