"""Which slices of Hugging Face tensors make up each rank's part of each Megatron-Core weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from verl.models.core.architecture import CoreArchitecture, Experts, padded_vocab
from verl.models.loading import ModelKind

Join: TypeAlias = Literal["plain", "qkv", "gate_up", "vocab"]
Stage: TypeAlias = 'Literal["first", "last"] | int'


@dataclass(frozen=True)
class CoreWeight:
    """A parameter of the whole model: Core's, and the Hugging Face tensors it is made of."""

    name: str
    """Core's, with the numbers that layer and expert have in the whole model."""
    hf: tuple[str, ...]
    """In memory: transformers has all experts of a layer in one tensor."""
    shape: tuple[int, ...]
    """Of the whole weight, without padding of the vocabulary."""
    join: Join = "plain"
    """How several become one: rows of queries, keys and values by group of heads; of gate and up by rank."""
    split: int | None = None
    """The dimension that tensor-parallel ranks (an expert's: expert-tensor-parallel ones) divide."""
    stage: Stage = "first"
    """Of the pipeline, or the layer it belongs to."""
    expert: int | None = None
    stored: tuple[str, ...] = ()
    """As in checkpoints on disk, where that differs: each expert has its own."""
    copy_of: str | None = None
    """A second copy of a tied weight, of that name."""

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """What each of `size` ranks holds."""
        if self.split is None:
            return self.shape
        whole = padded_vocab(self.shape[0], size) if self.join == "vocab" else self.shape[self.split]
        if whole % size or (self.join == "gate_up" and whole // 2 % size):
            raise ValueError(
                f"tensor_model_parallel_size: {size} ranks cannot divide {self.name} {list(self.shape)} evenly. "
                f"Choose a divisor of {whole}."
            )
        return tuple(whole // size if at == self.split else length for at, length in enumerate(self.shape))

    def as_one(self) -> CoreWeight:
        """The same weight as one tensor of Core's name, as a single rank would have it."""
        join: Join = "plain" if self.join == "qkv" else self.join
        return replace(self, hf=(self.name,), stored=(), expert=None, join=join)


@dataclass(frozen=True)
class Piece:
    """A rectangle that a Hugging Face tensor and a rank's shard have in common."""

    hf: str
    source: tuple[int | slice, ...]
    """Where it is in the Hugging Face tensor; a number is an expert's, of all experts in one tensor."""
    place: tuple[slice, ...]
    """Where it is in the shard."""


def weight_map(arch: CoreArchitecture, kind: ModelKind) -> list[CoreWeight]:
    """Every parameter of the whole model, in the order of the layers."""
    hidden, vocab = arch.hidden, (arch.vocab, arch.hidden)
    embedding = CoreWeight(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocab, join="vocab", split=0
    )
    norm = CoreWeight("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), stage="last")
    found = [embedding, *(weight for layer in range(arch.layers) for weight in _layer(arch, layer)), norm]
    if kind == "causal_lm":
        output = replace(embedding, name="output_layer.weight", stage="last")
        tied = replace(output, copy_of=embedding.name)
        return [*found, tied if arch.tied else replace(output, hf=("lm_head.weight",))]
    labels = 1 if kind == "value" else arch.labels
    score = CoreWeight("score.weight", ("score.weight",), (labels, hidden), stage="last")
    bias = replace(score, name="score.bias", hf=("score.bias",), shape=(labels,))
    return [*found, score, *([bias] if kind == "value" else [])]


def shard_slices(
    weight: CoreWeight, arch: CoreArchitecture, rank: int, size: int, *, stored: bool = False
) -> list[Piece]:
    """What `rank` of the `size` ranks that divide this weight holds of it. Rows of padding are in none of the pieces.

    `stored`: under the names of checkpoints on disk.
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
        place = (slice(at, at + length), *(slice(0, each) for each in shape[1:]))
        pieces.append(Piece(names[0 if one_tensor else part], source, place))
        at += length
    return pieces


def _columns(weight: CoreWeight, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    """Of dimensions after the first."""
    first = rank * shape[1] if weight.split == 1 else 0
    return tuple(slice(first, first + each) for each in shape[1:])


def _runs(weight: CoreWeight, arch: CoreArchitecture, rank: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Of a shard with so many rows, from the top: (which of the tensors, its first row, how many)."""
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
    """Core's rows: of each group its queries, its key, its value."""
    queries = arch.heads // arch.kv_heads * arch.head_dim
    for group in range(arch.kv_heads):
        yield 0, group * queries, queries
        yield 1, group * arch.head_dim, arch.head_dim
        yield 2, group * arch.head_dim, arch.head_dim


def _window(runs: Iterator[tuple[int, int, int]], first: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """The rows from `first` on of runs that follow each other."""
    at = 0
    for part, start, length in runs:
        begin, end = max(first, at), min(first + rows, at + length)
        if begin < end:
            yield part, start + begin - at, end - begin
        at += length


def _layer(arch: CoreArchitecture, layer: int) -> Iterator[CoreWeight]:
    hidden, heads = arch.hidden, arch.heads * arch.head_dim
    core, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention, theirs = f"{core}self_attention.", f"{hf}self_attn."
    qkv = heads + 2 * arch.kv_heads * arch.head_dim
    rows = CoreWeight("", (), (), split=0, stage=layer)
    whole = replace(rows, split=None)

    def projections(end: str) -> tuple[str, ...]:
        return tuple(f"{theirs}{each}_proj.{end}" for each in "qkv")

    yield replace(whole, name=f"{core}input_layernorm.weight", hf=(f"{hf}input_layernorm.weight",), shape=(hidden,))
    yield replace(rows, name=f"{attention}linear_qkv.weight", hf=projections("weight"), shape=(qkv, hidden), join="qkv")
    if arch.qkv_bias:
        yield replace(rows, name=f"{attention}linear_qkv.bias", hf=projections("bias"), shape=(qkv,), join="qkv")
    if arch.qk_norm:
        for each in "qk":
            norm = replace(whole, name=f"{attention}{each}_layernorm.weight", hf=(f"{theirs}{each}_norm.weight",))
            yield replace(norm, shape=(arch.head_dim,))
    output = replace(rows, name=f"{attention}linear_proj.weight", hf=(f"{theirs}o_proj.weight",), split=1)
    yield replace(output, shape=(hidden, heads))
    if arch.linear_bias:
        yield replace(whole, name=f"{attention}linear_proj.bias", hf=(f"{theirs}o_proj.bias",), shape=(hidden,))
    yield replace(
        whole, name=f"{core}pre_mlp_layernorm.weight", hf=(f"{hf}post_attention_layernorm.weight",), shape=(hidden,)
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
        ours, own = f"{core}experts.local_experts.{expert}.", f"{disk}experts.{expert}."
        first = CoreWeight(f"{ours}linear_fc1.weight", (f"{hf}experts.gate_up_proj",), (2 * experts.ffn, hidden))
        stored = (f"{own}{gate}.weight", f"{own}{up}.weight")
        yield replace(first, join="gate_up", split=0, stage=layer, expert=expert, stored=stored)
        second = CoreWeight(f"{ours}linear_fc2.weight", (f"{hf}experts.down_proj",), (hidden, experts.ffn))
        yield replace(second, split=1, stage=layer, expert=expert, stored=(f"{own}{down}.weight",))
    if experts.shared_ffn:
        yield from _mlp(arch, f"{core}shared_experts.", f"{hf}shared_expert.", experts.shared_ffn, layer)
        gated = CoreWeight(f"{core}shared_experts.gate_weight", (f"{hf}shared_expert_gate.weight",), (1, hidden))
        yield replace(gated, stage=layer)
