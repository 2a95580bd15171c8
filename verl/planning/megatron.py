"""What one model on the megatron engine takes of a rank, and what its ranks send each other: every formula, with its
reason.

c is the bytes of the compute dtype, H hidden, A and K the widths of queries and keys, I the MLP's. tp, pp, cp, dp, ep
and etp are the sizes of a layout. With sequence parallelism (tp above 1) a rank has 1/tp of the tokens between layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.models.core.architecture import padded_vocab
from verl.models.fused_head import chunk_bytes
from verl.planning.core_shapes import CoreShape, CoreSizes
from verl.planning.shapes import ModelShape


@dataclass(frozen=True)
class CoreModel:
    """One role's model on its engine, with the interface of `costs.TrainedModel`. Bytes on the fullest rank."""

    shape: ModelShape
    core: CoreShape
    sizes: CoreSizes
    kind: str = "causal_lm"
    compute_bytes: int = 2
    frozen: bool = False
    recompute: Mapping[str, Any] | None = None
    """As `MegatronConfig.recompute` says."""
    grad_offload: bool = False
    device: str = "cuda"
    bridged: bool = False
    """Whether Megatron-Bridge may convert its weights (`use_mbridge`)."""

    # ---------------------------------------------------------------- what stays between passes

    @property
    def learning(self) -> int:
        return 0 if self.frozen else self.shape.parameters

    @property
    def shards(self) -> int:
        """Ranks that divide what a checkpoint holds."""
        return self.sizes.world

    def weights(self) -> float:
        """In the compute dtype."""
        return max(self.compute_bytes * (dense + expert) for dense, expert in self._parameters)

    def moments(self) -> float:
        """AdamW's two and, below float32, the masters they belong to; of what a rank's optimizer owns."""
        each = 8 + (4 if self.compute_bytes < 4 else 0)
        return 0.0 if self.frozen else max(each * self._owned(*stage) for stage in self._parameters)

    def gradients(self) -> float:
        """One float32 buffer, whole on every rank that holds the weights."""
        return 0.0 if self.frozen else max(4 * (dense + expert) for dense, expert in self._parameters)

    def resting_gradients(self) -> float:
        """The buffer stays between updates unless it is given back."""
        return 0.0 if self.grad_offload else self.gradients()

    def on_their_way(self, bucket: float) -> float:
        """Weights in a hand-over: a bucket of so many bytes that is gathered while the one before it is read.

        Megatron-Bridge converts whole weights: every rank has one of Core's beside, and what it becomes. Experts come
        one by one, so the largest is the embedding, or what two projections of an MLP are in one.
        """
        largest = max(self.shape.embedding_parameters, 2 * self.shape.intermediate * self.core.hidden)
        return 2.0 * bucket + (2.0 * self.compute_bytes * largest if self.bridged else 0.0)

    # ---------------------------------------------------------------- while a pass runs

    def layer_activations(self, layer: int) -> float:
        """Bytes per token that one layer keeps for its backward pass.

        As in `costs`: norms (divided where tokens are), attention and MLP (divided over tensor ranks). Experts: a
        token goes to several of them, evenly spread, so a rank computes as many as it sends: their inputs (gathered
        over expert tensor ranks), what the MLP keeps, and their outputs, which are weighed.
        """
        s, c, n = self.core, self.compute_bytes, self.sizes
        return 2 * (4 + 2 * c) * s.hidden / n.token_ranks + self._attention() + self._mlp(layer)

    def inference(self, tokens: int, answers: int) -> dict[str, float]:
        """Parts of a pass without gradient over `tokens`, of which `answers` give log-probs or values."""
        s, c, n = self.core, self.compute_bytes, self.sizes
        wide = max(self._mlp(layer) for layer in range(s.layers)) * 3 / 4
        layers = tokens * (2 * c * s.hidden / n.token_ranks + max(wide, 12 * s.hidden / n.token_ranks))
        ends = c * s.hidden * (tokens / n.token_ranks + answers)
        head = self._logits(answers)
        fullest = {"activations": layers, "head": 0.0} if layers >= ends + head else {"activations": ends, "head": head}
        return {"gathered": self._gather_buffer(tokens), **fullest}

    def update(self, tokens: int, answers: int, passes: int) -> dict[str, float]:
        """Parts at the fullest moment of an update, on the fullest stage: a backward pass begins in the head, or in a
        layer, while the pipeline holds the activations of several micro-batches."""
        return max(self._moments_of_update(tokens, answers, passes), key=lambda parts: sum(parts.values()))

    def _moments_of_update(self, tokens: int, answers: int, passes: int) -> list[dict[str, float]]:
        s, c, n = self.core, self.compute_bytes, self.sizes
        found = []
        for stage, chunks in enumerate(n.stages(s.layers)):
            dense, expert = self._parameters[stage]
            last = stage == n.pp - 1
            kept = n.in_flight(stage, passes) * tokens * sum(self._kept(chunk)[0] for chunk in chunks)
            kept += tokens * (4 + 2 * c) * s.hidden / n.token_ranks + answers * c * s.hidden if last else 0.0
            again = max((self._kept(chunk)[1] for chunk in chunks), default=0.0)
            widest = max(2 * c * s.ffn / n.tp, 12 * s.hidden / n.token_ranks)
            common = {"gradients": 4 * (dense + expert), "gathered": self._gather_buffer(tokens)}
            found.append({**common, "activations": kept + tokens * (again + widest), "head": 0.0})
            if last:
                found.append({**common, "activations": kept, "head": self._head_backward(answers)})
        return found

    # ---------------------------------------------------------------- what ranks send

    def communication(self, tokens: float) -> dict[str, float]:
        """Bytes that a rank sends in one optimizer step, by kind of group, in which its context rank sees `tokens`.

        Every kind sends (size - 1) / size of what it moves. tensor: a layer gathers and scatters its tokens twice in
        a forward pass and thrice (weights' gradients need the inputs again) in a backward pass. context: queries, keys,
        values there and outputs back. expert: each token to its experts and back. pipeline: a stage's output, and its
        gradient. data: gradients in float32 and, with the distributed optimizer, weights back in the compute dtype.
        """
        s, c, n = self.core, self.compute_bytes, self.sizes
        again = 1 if (self.recompute or {}).get("recompute_granularity") == "full" else 0
        stage = max(range(n.pp), key=lambda index: sum(map(len, n.stages(s.layers)[index])))
        layers = [layer for chunk in n.stages(s.layers)[stage] for layer in chunk]
        sparse = sum(map(s.is_sparse, layers))
        maps = 2 * len(layers) - sparse  # attention and MLP of a dense layer, attention of one with experts
        dense, expert = self._parameters[stage]
        unit = c * s.hidden
        back = 3 if n.sequence_parallel else 2
        exchanged = c * (2 * s.query_width + 2 * s.key_width) / n.tp
        each = 4 + c if n.distributed_optimizer else 8
        return {
            "tensor": _sent(n.tp, tokens * unit * maps * (2 * (1 + again) + back)),
            "context": _sent(n.cp, tokens * exchanged * len(layers) * (2 + again)),
            "expert": _sent(n.ep, tokens / n.token_ranks * s.per_token * 2 * unit * sparse * (2 + again)),
            "pipeline": 2 * tokens * unit / n.token_ranks * n.vpp if n.pp > 1 else 0.0,
            "data": each * (_sent(n.copies, dense) + _sent(n.expert_copies, expert)),
        }

    # ---------------------------------------------------------------- parts

    @functools.cached_property
    def _parameters(self) -> list[tuple[float, float]]:
        """Of a rank of each stage: outside the experts, and in them."""
        s, n = self.core, self.sizes
        rows = padded_vocab(s.vocab, n.tp) / n.tp * s.hidden
        found = []
        for stage, chunks in enumerate(n.stages(s.layers)):
            layers = [s.layer_parameters(layer, n) for chunk in chunks for layer in chunk]
            dense = sum(each for each, _ in layers) + (rows if stage == 0 else 0)
            if stage == n.pp - 1:
                shared = s.tied and n.pp == 1
                dense += s.hidden + (s.hidden if self.kind != "causal_lm" else 0 if shared else rows)
            found.append((dense, sum(each for _, each in layers)))
        return found

    def _owned(self, dense: float, expert: float) -> float:
        if not self.sizes.distributed_optimizer:
            return dense + expert
        return dense / self.sizes.copies + expert / self.sizes.expert_copies

    def _attention(self) -> float:
        s, c = self.core, self.compute_bytes
        head_norms = (4 + c) * (s.query_width + s.key_width) if s.head_norms else 0
        return (c * (2 * s.query_width + 2 * s.key_width) + 4 * s.heads + head_norms) / self.sizes.tp

    def _mlp(self, layer: int) -> float:
        s, c, n = self.core, self.compute_bytes, self.sizes
        if not s.is_sparse(layer):
            return 4 * c * s.ffn / n.tp
        routed = s.per_token * c * (s.hidden * (n.etp + 1) + 4 * s.expert_ffn)
        return (routed + 4 * s.experts) / n.token_ranks + 4 * c * s.shared_ffn / n.tp

    def _kept(self, layers: Sequence[int]) -> tuple[float, float]:
        """Bytes per token that a chunk of layers keeps, and that are computed again at once."""
        settings = self.recompute or {}
        granularity, count = settings.get("recompute_granularity"), settings.get("recompute_num_layers") or 1
        sizes = [self.layer_activations(layer) for layer in layers]
        if not sizes or granularity is None:
            return sum(sizes), 0.0
        inputs = self.compute_bytes * self.core.hidden / self.sizes.token_ranks
        if granularity == "selective":
            saved = [self._saved(layer, settings.get("recompute_modules") or ["core_attn"]) for layer in layers]
            return sum(sizes) - sum(saved), max(saved)
        if settings.get("recompute_method") == "block":
            return inputs * min(count, len(sizes)) + sum(sizes[count:]), max(sizes)
        return inputs * math.ceil(len(sizes) / count), count * max(sizes)

    def _saved(self, layer: int, modules: Sequence[str]) -> float:
        """Of a layer, what `modules` need not keep; of others nothing is taken off."""
        s, c, n = self.core, self.compute_bytes, self.sizes
        parts = {
            "core_attn": (c * s.query_width + 4 * s.heads) / n.tp,
            "layernorm": 2 * c * s.hidden / n.token_ranks,
            "moe" if s.is_sparse(layer) else "mlp": self._mlp(layer),
        }
        return sum(size for name, size in parts.items() if name in modules)

    def _gather_buffer(self, tokens: int) -> float:
        """Tokens of all tensor ranks, in front of a layer that is split."""
        return float(tokens * self.compute_bytes * self.core.hidden) if self.sizes.token_ranks > 1 else 0.0

    def _logits(self, answers: int) -> float:
        """A chunk of this rank's columns of them, and five numbers per row."""
        if self.kind != "causal_lm":
            return 4.0 * answers
        columns = padded_vocab(self.core.vocab, self.sizes.tp) // self.sizes.tp
        return chunk_bytes(answers, columns, self.compute_bytes, self.device) + 20.0 * answers

    def _head_backward(self, answers: int) -> float:
        """A chunk of logits and its gradient, that of hidden states, and the head's: float32 over several chunks."""
        if self.kind != "causal_lm":
            return 4.0 * answers
        c, columns = self.compute_bytes, padded_vocab(self.core.vocab, self.sizes.tp) // self.sizes.tp
        chunk = chunk_bytes(answers, columns, c, self.device)
        several = chunk < answers * columns * max(4, c)
        weight = (4 + c if several else c) * columns * self.core.hidden
        return self._logits(answers) + (chunk * c / 4 if c < 4 else 0) + answers * c * self.core.hidden + weight


def _sent(size: int, moved: float) -> float:
    return moved * (size - 1) / size
