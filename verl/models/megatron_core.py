"""Hugging Face models in Megatron-Core ("Core"): the architecture, and the mapping of weights to shards of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:  # imports torch
    from verl.models.loading import ModelKind

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma")
_SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = _DENSE + _SPARSE
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Config fields that must have one of these values if they exist.
_SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": _ACTIVATIONS,
    "attention_dropout": (0, 0.0, None),
    "router_jitter_noise": (0, 0.0, None),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class Experts:
    """The experts of the sparse layers of a model."""

    count: int
    per_token: int
    ffn: int
    """MLP width of one expert."""
    normalized: bool
    """Whether the weights of the selected experts are normalized to sum 1."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others are dense."""
    shared_ffn: int = 0
    """MLP width of the shared expert, which has its own gate; 0: none."""


@dataclass(frozen=True)
class CoreArchitecture:
    """The architecture of a model, as Core needs it."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    labels: int
    """Number of labels of a sequence classifier."""
    tied: bool
    norm_eps: float
    norm_adds_one: bool
    """Whether norms multiply by 1 + weight (Gemma)."""
    qk_norm: bool
    qkv_bias: bool
    linear_bias: bool
    """Whether the other linear layers have a bias."""
    activation: Literal["silu", "gelu_pytorch_tanh"]
    """Activation of the gate; the MLPs of all families are gated."""
    embedding_scale: float
    rope: Mapping[str, Any]
    """`rope_type`, `rope_theta` and other parameters of transformers."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None: full attention."""
    experts: Experts | None

    @classmethod
    def from_config(cls, hf_config: Any) -> CoreArchitecture:
        """Return the architecture; raise ValueError, which names the field, for a config that Core does not support."""
        family = hf_config.model_type
        if family not in FAMILIES:
            raise _unsupported("model_type", family, FAMILIES)
        for field, allowed in _SUPPORTED_VALUES.items():
            value = getattr(hf_config, field, None if None in allowed else allowed[0])
            if value not in allowed:
                raise _unsupported(field, value, allowed)
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        mlp_bias = bool(getattr(hf_config, "mlp_bias", False))
        if attention_bias != mlp_bias:
            field = "attention_bias" if hasattr(hf_config, "attention_bias") else "mlp_bias"
            raise _unsupported(field, getattr(hf_config, field), ("equal for attention and MLP",))
        qwen2_bias = family == "qwen2" or (family == "qwen2_moe" and hf_config.qkv_bias)
        return cls(
            family=family,
            layers=hf_config.num_hidden_layers,
            hidden=hf_config.hidden_size,
            heads=hf_config.num_attention_heads,
            kv_heads=hf_config.num_key_value_heads or hf_config.num_attention_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
            ffn=hf_config.intermediate_size,
            vocab=hf_config.vocab_size,
            labels=hf_config.num_labels,
            tied=bool(hf_config.tie_word_embeddings),
            norm_eps=hf_config.rms_norm_eps,
            norm_adds_one=family == "gemma",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=attention_bias or qwen2_bias,
            linear_bias=attention_bias,
            activation=hf_config.hidden_act,
            embedding_scale=math.sqrt(hf_config.hidden_size) if family == "gemma" else 1.0,
            rope=dict(hf_config.rope_parameters),
            windows=_windows(hf_config),
            experts=_experts(hf_config) if family in _SPARSE else None,
        )

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def padded_vocab(vocab: int, tp_size: int) -> int:
    """Return the rows of the padded embedding: every rank has the same number, a multiple of 128."""
    return math.ceil(vocab / (128 * tp_size)) * 128 * tp_size


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise _unsupported("layer_types", unknown, ("full_attention", "sliding_attention"))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: Any) -> Experts:
    count, layers = config.num_experts, range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        all_sparse = tuple(True for _ in layers)
        return Experts(count, config.num_experts_per_tok, config.intermediate_size, True, all_sparse)
    sparse = tuple(
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0 for layer in layers
    )
    shared = config.shared_expert_intermediate_size if config.model_type == "qwen2_moe" else 0
    normalized = bool(config.norm_topk_prob)
    return Experts(count, config.num_experts_per_tok, config.moe_intermediate_size, normalized, sparse, shared)


def _unsupported(field: str, value: Any, allowed: tuple[Any, ...]) -> ValueError:
    choices = ", ".join(map(str, allowed))
    return ValueError(
        f"config.json: {field} is {value!r}, which the Megatron engine does not support (supported: {choices}). Use "
        "strategy=fsdp for this model."
    )


# ---------------------------------------------------------------- weights

Join: TypeAlias = Literal["plain", "qkv", "gate_up", "vocab"]
Stage: TypeAlias = 'Literal["first", "last"] | int'


@dataclass(frozen=True)
class CoreWeight:
    """A parameter of Core's unsharded model, and the Hugging Face tensors that it consists of."""

    name: str
    """Core's name, with global layer and expert indices."""
    hf: tuple[str, ...]
    """Names of the Hugging Face tensors in memory, where all experts of a layer are one tensor."""
    shape: tuple[int, ...]
    """Unsharded shape, without padding of the vocabulary."""
    join: Join = "plain"
    """Order of the rows. `qkv`: for each query group its queries, key and value. `gate_up`: for each rank its part of
    gate, then of up. `plain`: that of the Hugging Face tensor. `vocab`: the same, with padding at the end."""
    split: int | None = None
    """The dimension divided over tensor-parallel ranks (for experts: expert-tensor-parallel ranks)."""
    stage: Stage = "first"
    """Pipeline stage, or the index of its layer."""
    expert: int | None = None
    stored: tuple[str, ...] = ()
    """Names in checkpoint files, if they differ (one tensor per expert)."""
    copy_of: str | None = None
    """Name of the tied weight that this is a copy of."""

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of one shard if `size` ranks divide the weight."""
        if self.split is None:
            return self.shape
        total = padded_vocab(self.shape[0], size) if self.join == "vocab" else self.shape[self.split]
        if total % size or (self.join == "gate_up" and total // 2 % size):
            raise ValueError(
                f"tensor_model_parallel_size: {size} ranks cannot divide {self.name} {list(self.shape)} evenly. "
                f"Use a divisor of {total}."
            )
        return tuple(total // size if at == self.split else length for at, length in enumerate(self.shape))

    def unsharded(self) -> CoreWeight:
        """Return the same weight as a single tensor with Core's name, as on a single rank."""
        join: Join = "plain" if self.join == "qkv" else self.join
        return replace(self, hf=(self.name,), stored=(), expert=None, join=join)


@dataclass(frozen=True)
class Piece:
    """The intersection of a Hugging Face tensor with the shard of a rank."""

    hf: str
    source: tuple[int | slice, ...]
    """Index in the Hugging Face tensor; an int is the index of an expert."""
    place: tuple[slice, ...]
    """Index in the shard."""


def weight_map(arch: CoreArchitecture, kind: ModelKind) -> list[CoreWeight]:
    """Return all parameters of the model in the order of the layers."""
    hidden, vocab = arch.hidden, (arch.vocab, arch.hidden)
    embedding = CoreWeight(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocab, join="vocab", split=0
    )
    norm = CoreWeight("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), stage="last")
    body = [embedding, *(weight for layer in range(arch.layers) for weight in _layer(arch, layer)), norm]
    if kind == "causal_lm":
        output = replace(embedding, name="output_layer.weight", stage="last")
        tied = replace(output, copy_of=embedding.name)
        return [*body, tied if arch.tied else replace(output, hf=("lm_head.weight",))]
    labels = 1 if kind == "value" else arch.labels
    score = CoreWeight("score.weight", ("score.weight",), (labels, hidden), stage="last")
    bias = replace(score, name="score.bias", hf=("score.bias",), shape=(labels,))
    return [*body, score, *([bias] if kind == "value" else [])]


def shard_slices(
    weight: CoreWeight, arch: CoreArchitecture, rank: int, size: int, *, stored: bool = False
) -> list[Piece]:
    """Return the pieces of the shard of `rank`, one of `size` ranks that divide the weight, without vocabulary padding.

    `stored`: use the names of checkpoint files.
    """
    names = weight.stored if stored and weight.stored else weight.hf
    fused = weight.expert is not None and names is weight.hf
    shape = weight.shard_shape(size)
    columns = _columns(weight, shape, rank)
    pieces, at = [], 0
    for part, start, length in _runs(weight, arch, rank, shape[0]):
        one_tensor = len(names) == 1
        offset = part * (weight.shape[0] // 2) if one_tensor else 0
        source: tuple[int | slice, ...] = (slice(offset + start, offset + start + length), *columns)
        if fused:
            assert weight.expert is not None
            source = (weight.expert, *source)
        place = (slice(at, at + length), *(slice(0, length) for length in shape[1:]))
        pieces.append(Piece(names[0 if one_tensor else part], source, place))
        at += length
    return pieces


def _columns(weight: CoreWeight, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    """Return the slices of the dimensions after the first."""
    first = rank * shape[1] if weight.split == 1 else 0
    return tuple(slice(first, first + length) for length in shape[1:])


def _runs(weight: CoreWeight, arch: CoreArchitecture, rank: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the tensor, first row, number of rows) for a shard of `rows` rows, from the top."""
    if weight.split != 0:
        yield 0, 0, rows
    elif weight.join == "gate_up":
        yield 0, rank * (rows // 2), rows // 2
        yield 1, rank * (rows // 2), rows // 2
    elif weight.join == "qkv":
        yield from _window(_query_groups(arch), rank * rows, rows)
    else:
        yield from _window(iter([(0, 0, weight.shape[0])]), rank * rows, rows)


def _query_groups(arch: CoreArchitecture) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of Core's fused weight: for each query group its queries, its key, its value."""
    queries = arch.heads // arch.kv_heads * arch.head_dim
    for group in range(arch.kv_heads):
        yield 0, group * queries, queries
        yield 1, group * arch.head_dim, arch.head_dim
        yield 2, group * arch.head_dim, arch.head_dim


def _window(runs: Iterator[tuple[int, int, int]], first: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield the part of consecutive runs from row `first` to `first + rows`."""
    at = 0
    for part, start, length in runs:
        begin, end = max(first, at), min(first + rows, at + length)
        if begin < end:
            yield part, start + begin - at, end - begin
        at += length


def _layer(arch: CoreArchitecture, layer: int) -> Iterator[CoreWeight]:
    hidden, heads = arch.hidden, arch.heads * arch.head_dim
    core, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention, hf_attention = f"{core}self_attention.", f"{hf}self_attn."
    qkv = heads + 2 * arch.kv_heads * arch.head_dim
    split_rows = CoreWeight("", (), (), split=0, stage=layer)
    replicated = replace(split_rows, split=None)

    def projections(end: str) -> tuple[str, ...]:
        return tuple(f"{hf_attention}{letter}_proj.{end}" for letter in "qkv")

    yield replace(
        replicated, name=f"{core}input_layernorm.weight", hf=(f"{hf}input_layernorm.weight",), shape=(hidden,)
    )
    yield replace(
        split_rows, name=f"{attention}linear_qkv.weight", hf=projections("weight"), shape=(qkv, hidden), join="qkv"
    )
    if arch.qkv_bias:
        yield replace(split_rows, name=f"{attention}linear_qkv.bias", hf=projections("bias"), shape=(qkv,), join="qkv")
    if arch.qk_norm:
        for letter in "qk":
            norm = replace(
                replicated, name=f"{attention}{letter}_layernorm.weight", hf=(f"{hf_attention}{letter}_norm.weight",)
            )
            yield replace(norm, shape=(arch.head_dim,))
    output = replace(split_rows, name=f"{attention}linear_proj.weight", hf=(f"{hf_attention}o_proj.weight",), split=1)
    yield replace(output, shape=(hidden, heads))
    if arch.linear_bias:
        yield replace(
            replicated, name=f"{attention}linear_proj.bias", hf=(f"{hf_attention}o_proj.bias",), shape=(hidden,)
        )
    yield replace(
        replicated,
        name=f"{core}pre_mlp_layernorm.weight",
        hf=(f"{hf}post_attention_layernorm.weight",),
        shape=(hidden,),
    )
    if arch.experts is not None and arch.is_sparse(layer):
        yield from _sparse(arch, arch.experts, layer)
    else:
        yield from _mlp(arch, f"{core}mlp.", f"{hf}mlp.", arch.ffn, layer)


def _mlp(arch: CoreArchitecture, core: str, hf: str, ffn: int, layer: int) -> Iterator[CoreWeight]:
    names = {end: (f"{hf}gate_proj.{end}", f"{hf}up_proj.{end}") for end in ("weight", "bias")}
    first = CoreWeight(f"{core}linear_fc1.weight", names["weight"], (2 * ffn, arch.hidden), "gate_up", 0, layer)
    yield first
    if arch.linear_bias:
        yield replace(first, name=f"{core}linear_fc1.bias", hf=names["bias"], shape=(2 * ffn,))
    yield CoreWeight(f"{core}linear_fc2.weight", (f"{hf}down_proj.weight",), (arch.hidden, ffn), "plain", 1, layer)
    if arch.linear_bias:
        yield CoreWeight(f"{core}linear_fc2.bias", (f"{hf}down_proj.bias",), (arch.hidden,), stage=layer)


def _sparse(arch: CoreArchitecture, experts: Experts, layer: int) -> Iterator[CoreWeight]:
    core, hf, hidden = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp.", arch.hidden
    mixtral = arch.family == "mixtral"
    disk = f"model.layers.{layer}.block_sparse_moe." if mixtral else hf
    gate, down, up = ("w1", "w2", "w3") if mixtral else ("gate_proj", "down_proj", "up_proj")
    yield CoreWeight(
        f"{core}router.weight",
        (f"{hf}gate.weight",),
        (experts.count, hidden),
        stage=layer,
        stored=(f"{disk}gate.weight",) if mixtral else (),
    )
    for expert in range(experts.count):
        core_expert, stored_expert = f"{core}experts.local_experts.{expert}.", f"{disk}experts.{expert}."
        first = CoreWeight(f"{core_expert}linear_fc1.weight", (f"{hf}experts.gate_up_proj",), (2 * experts.ffn, hidden))
        stored = (f"{stored_expert}{gate}.weight", f"{stored_expert}{up}.weight")
        yield replace(first, join="gate_up", split=0, stage=layer, expert=expert, stored=stored)
        second = CoreWeight(f"{core_expert}linear_fc2.weight", (f"{hf}experts.down_proj",), (hidden, experts.ffn))
        yield replace(second, split=1, stage=layer, expert=expert, stored=(f"{stored_expert}{down}.weight",))
    if experts.shared_ffn:
        yield from _mlp(arch, f"{core}shared_experts.", f"{hf}shared_expert.", experts.shared_ffn, layer)
        gated = CoreWeight(f"{core}shared_experts.gate_weight", (f"{hf}shared_expert_gate.weight",), (1, hidden))
        yield replace(gated, stage=layer)


@dataclass(frozen=True)
class Rectangle:
    """Rows and columns of a matrix."""

    rows: range
    columns: range


def matrix_rectangles(width: int, start: int, stop: int) -> Iterator[Rectangle]:
    """Split elements `start` to `stop` of a row-major matrix with rows of `width` (a range of a flat optimizer buffer)
    into the end of a row, whole rows, and the start of a row."""
    while start < stop:
        row, column = divmod(start, width)
        whole = (stop - start) // width if column == 0 else 0
        if whole:
            yield Rectangle(range(row, row + whole), range(width))
            start += whole * width
        else:
            end = min(stop, (row + 1) * width)
            yield Rectangle(range(row, row + 1), range(column, column + end - start))
            start = end
