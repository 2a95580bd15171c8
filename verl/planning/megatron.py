"""Device memory and communication volume of a model on the megatron engine: all formulas, with their reasons.

Symbols: s shape of the model, c bytes of the compute dtype, n parallel sizes of the layout. With sequence parallelism
(tp above 1) a rank has 1/tp of the tokens between layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.models.megatron_core import padded_vocab
from verl.planning.shapes import CoreShape, MegatronLayout, ModelShape
from verl.utils.buffer_sizes import chunk_bytes


@dataclass(frozen=True)
class MegatronModelMemory:
    """Memory of the model of one role, in bytes on the rank with the most. Same interface as `FSDPModelMemory`."""

    shape: ModelShape
    core: CoreShape
    layout: MegatronLayout
    kind: str = "causal_lm"
    compute_bytes: int = 2
    frozen: bool = False
    recompute: Mapping[str, Any] | None = None
    """Result of `MegatronConfig.recompute`."""
    grad_offload: bool = False
    device: str = "cuda"
    bridged: bool = False
    """Whether Megatron-Bridge may convert its weights (`use_mbridge`)."""

    # ---------------------------------------------------------------- state between passes

    @property
    def trained_parameters(self) -> int:
        return 0 if self.frozen else self.shape.parameters

    @property
    def shards(self) -> int:
        """Number of ranks that share the contents of a checkpoint."""
        return self.layout.world

    def weights(self) -> float:
        """Weights in the compute dtype."""
        return max(self.compute_bytes * (dense + expert) for dense, expert in self._parameters)

    def moments(self) -> float:
        """The two moments of AdamW and, below float32, master weights, of the parameters owned by the optimizer."""
        bytes_per_parameter = 8 + (4 if self.compute_bytes < 4 else 0)
        return 0.0 if self.frozen else max(bytes_per_parameter * self._owned(*stage) for stage in self._parameters)

    def gradients(self) -> float:
        """A float32 buffer, not sharded over data-parallel ranks."""
        return 0.0 if self.frozen else max(4 * (dense + expert) for dense, expert in self._parameters)

    def gradients_between_updates(self) -> float:
        """The gradient buffer stays allocated between updates, unless it is offloaded."""
        return 0.0 if self.grad_offload else self.gradients()

    def weight_sync_bytes(self, bucket: float) -> float:
        """Buffers of a weight sync: a bucket of `bucket` bytes is gathered while the previous one is read.

        Megatron-Bridge converts unsharded weights: every rank holds one weight in both formats. Experts are converted
        one by one, so the largest weight is the embedding, or the two fused projections of an MLP.
        """
        largest = max(self.shape.embedding_parameters, 2 * self.shape.intermediate * self.core.hidden)
        return 2.0 * bucket + (2.0 * self.compute_bytes * largest if self.bridged else 0.0)

    # ---------------------------------------------------------------- forward and backward passes

    def layer_activations(self, layer: int) -> float:
        """Bytes per token that one layer saves for its backward pass.

        As in `planning.fsdp`: norms (divided by sequence parallelism), attention and MLP (divided over tensor-parallel
        ranks). Experts: tokens are assumed to be evenly distributed, so a rank computes as many as it sends. Saved are
        their inputs (gathered over expert-tensor-parallel ranks), the tensors of the MLP, and their outputs, which are
        multiplied by the router's weights.
        """
        s, c, n = self.core, self.compute_bytes, self.layout
        return 2 * (4 + 2 * c) * s.hidden / n.token_ranks + self._attention() + self._mlp(layer)

    def inference(self, tokens: int, response_tokens: int) -> dict[str, float]:
        """Return the peak bytes of a pass without gradient, by part: over `tokens`, of which `response_tokens` get
        log-probs or values."""
        s, c, n = self.core, self.compute_bytes, self.layout
        # Three of the four tensors that an MLP saves in training exist at the same time.
        mlp = max(self._mlp(layer) for layer in range(s.layers)) * 3 / 4
        layers = tokens * (2 * c * s.hidden / n.token_ranks + max(mlp, 12 * s.hidden / n.token_ranks))
        final_states = c * s.hidden * (tokens / n.token_ranks + response_tokens)
        head = self._logits(response_tokens)
        in_layers = {"activations": layers, "head": 0.0}
        in_head = {"activations": final_states, "head": head}
        return {
            "gathered": self._gather_buffer(tokens),
            **(in_layers if layers >= final_states + head else in_head),
        }

    def update(self, tokens: int, response_tokens: int, micro_batches: int) -> dict[str, float]:
        """Return the peak bytes of an optimizer step, by part, on the stage with the most.

        The peak is at the start of a backward pass, in the head or in a layer, while the pipeline holds the activations
        of several micro-batches.
        """
        return max(self._update_peaks(tokens, response_tokens, micro_batches), key=lambda parts: sum(parts.values()))

    def _update_peaks(self, tokens: int, response_tokens: int, micro_batches: int) -> list[dict[str, float]]:
        s, c, n = self.core, self.compute_bytes, self.layout
        peaks = []
        for stage, chunks in enumerate(n.stages(s.layers)):
            dense, expert = self._parameters[stage]
            last = stage == n.pp - 1
            saved = n.in_flight(stage, micro_batches) * tokens * sum(self._saved(chunk)[0] for chunk in chunks)
            if last:  # the final norm and the hidden states of the responses
                saved += tokens * (4 + 2 * c) * s.hidden / n.token_ranks + response_tokens * c * s.hidden
            recomputed = max((self._saved(chunk)[1] for chunk in chunks), default=0.0)
            temporaries = max(2 * c * s.ffn / n.tp, 12 * s.hidden / n.token_ranks)
            common = {"gradients": 4 * (dense + expert), "gathered": self._gather_buffer(tokens)}
            peaks.append({**common, "activations": saved + tokens * (recomputed + temporaries), "head": 0.0})
            if last:
                peaks.append({**common, "activations": saved, "head": self._head_backward(response_tokens)})
        return peaks

    # ---------------------------------------------------------------- communication

    def communication(self, tokens: float) -> dict[str, float]:
        """Return the bytes that a rank sends in one optimizer step, by kind of process group.

        `tokens`: of the step, per context-parallel rank.

        A collective over `size` ranks sends (size - 1) / size of its data. tensor: each layer gathers and scatters its
        tokens twice in the forward and three times in the backward pass (gradients of weights need the inputs again).
        context: queries, keys and values, and outputs back. expert: tokens to their experts and back. pipeline: the
        output of a stage, and its gradient. data: gradients in float32 and, with the distributed optimizer, weights in
        the compute dtype.
        """
        s, c, n = self.core, self.compute_bytes, self.layout
        extra_forwards = 1 if (self.recompute or {}).get("recompute_granularity") == "full" else 0
        stage = max(range(n.pp), key=lambda index: sum(map(len, n.stages(s.layers)[index])))
        layers = [layer for chunk in n.stages(s.layers)[stage] for layer in chunk]
        sparse = sum(map(s.is_sparse, layers))
        blocks = 2 * len(layers) - sparse  # tensor-parallel: attention, and the MLP of dense layers
        dense, expert = self._parameters[stage]
        state = c * s.hidden
        backward = 3 if n.sequence_parallel else 2
        attention = c * (2 * s.query_width + 2 * s.key_width) / n.tp
        # Without the distributed optimizer, an all-reduce sends the float32 gradients twice.
        bytes_per_parameter = 4 + c if n.distributed_optimizer else 8
        return {
            "tensor": _sent(n.tp, tokens * state * blocks * (2 * (1 + extra_forwards) + backward)),
            "context": _sent(n.cp, tokens * attention * len(layers) * (2 + extra_forwards)),
            "expert": _sent(n.ep, tokens / n.token_ranks * s.per_token * 2 * state * sparse * (2 + extra_forwards)),
            "pipeline": 2 * tokens * state / n.token_ranks * n.vpp if n.pp > 1 else 0.0,
            "data": bytes_per_parameter * (_sent(n.copies, dense) + _sent(n.expert_copies, expert)),
        }

    # ---------------------------------------------------------------- parts

    @functools.cached_property
    def _parameters(self) -> list[tuple[float, float]]:
        """Return for each stage the parameters of a rank: outside the experts, and of the experts."""
        s, n = self.core, self.layout
        embedding = padded_vocab(s.vocab, n.tp) / n.tp * s.hidden
        by_stage = []
        for stage, chunks in enumerate(n.stages(s.layers)):
            layers = [s.layer_parameters(layer, n) for chunk in chunks for layer in chunk]
            dense = sum(outside for outside, _ in layers) + (embedding if stage == 0 else 0)
            if stage == n.pp - 1:
                shares_embedding = s.tied and n.pp == 1
                dense += s.hidden + (s.hidden if self.kind != "causal_lm" else 0 if shares_embedding else embedding)
            by_stage.append((dense, sum(expert for _, expert in layers)))
        return by_stage

    def _owned(self, dense: float, expert: float) -> float:
        """Return how many parameters a rank updates: the distributed optimizer shards them over data-parallel ranks."""
        if not self.layout.distributed_optimizer:
            return dense + expert
        return dense / self.layout.copies + expert / self.layout.expert_copies

    def _attention(self) -> float:
        """Return the bytes per token that attention saves."""
        s, c = self.core, self.compute_bytes
        head_norms = (4 + c) * (s.query_width + s.key_width) if s.head_norms else 0
        return (c * (2 * s.query_width + 2 * s.key_width) + 4 * s.heads + head_norms) / self.layout.tp

    def _mlp(self, layer: int) -> float:
        """Return the bytes per token that the MLP of a layer, or its experts, save."""
        s, c, n = self.core, self.compute_bytes, self.layout
        if not s.is_sparse(layer):
            return 4 * c * s.ffn / n.tp
        routed = s.per_token * c * (s.hidden * (n.etp + 1) + 4 * s.expert_ffn)
        return (routed + 4 * s.experts) / n.token_ranks + 4 * c * s.shared_ffn / n.tp

    def _saved(self, layers: Sequence[int]) -> tuple[float, float]:
        """Return the bytes per token that a chunk of layers saves, and those that exist at the same time while it is
        recomputed."""
        settings = self.recompute or {}
        granularity, count = settings.get("recompute_granularity"), settings.get("recompute_num_layers") or 1
        sizes = [self.layer_activations(layer) for layer in layers]
        if not sizes or granularity is None:
            return sum(sizes), 0.0
        inputs = self.compute_bytes * self.core.hidden / self.layout.token_ranks
        if granularity == "selective":
            modules = settings.get("recompute_modules") or ["core_attn"]
            recomputed = [self._recomputed(layer, modules) for layer in layers]
            return sum(sizes) - sum(recomputed), max(recomputed)
        if settings.get("recompute_method") == "block":
            return inputs * min(count, len(sizes)) + sum(sizes[count:]), max(sizes)
        return inputs * math.ceil(len(sizes) / count), count * max(sizes)

    def _recomputed(self, layer: int, modules: Sequence[str]) -> float:
        """Bytes per token of a layer that need not be saved if `modules` are recomputed; unknown modules count as 0."""
        s, c, n = self.core, self.compute_bytes, self.layout
        parts = {
            "core_attn": (c * s.query_width + 4 * s.heads) / n.tp,
            "layernorm": 2 * c * s.hidden / n.token_ranks,
            "moe" if s.is_sparse(layer) else "mlp": self._mlp(layer),
        }
        return sum(size for name, size in parts.items() if name in modules)

    def _gather_buffer(self, tokens: int) -> float:
        """Hidden states of all tensor-parallel ranks, the input of a tensor-parallel layer."""
        return float(tokens * self.compute_bytes * self.core.hidden) if self.layout.token_ranks > 1 else 0.0

    def _logits(self, response_tokens: int) -> float:
        """A chunk of this rank's columns of the logits, and five float32 numbers per row."""
        if self.kind != "causal_lm":
            return 4.0 * response_tokens
        columns = padded_vocab(self.core.vocab, self.layout.tp) // self.layout.tp
        return chunk_bytes(response_tokens, columns, self.compute_bytes, self.device) + 20.0 * response_tokens

    def _head_backward(self, response_tokens: int) -> float:
        """A chunk of logits and its gradient, and the gradients of hidden states and head (the latter is accumulated in
        float32 if there are several chunks)."""
        if self.kind != "causal_lm":
            return 4.0 * response_tokens
        c, columns = self.compute_bytes, padded_vocab(self.core.vocab, self.layout.tp) // self.layout.tp
        chunk = chunk_bytes(response_tokens, columns, c, self.device)
        several_chunks = chunk < response_tokens * columns * max(4, c)
        weight = (4 + c if several_chunks else c) * columns * self.core.hidden
        chunk_gradient = chunk * c / 4 if c < 4 else 0
        return self._logits(response_tokens) + chunk_gradient + response_tokens * c * self.core.hidden + weight


def _sent(size: int, data: float) -> float:
    """Return the part of `data` that each of `size` ranks sends in a collective."""
    return data * (size - 1) / size
