"""Device memory of a model on the fsdp engine in training and inference: all formulas, with their reasons.

Symbols: s is the shape of the model, c the bytes of an element of the compute dtype, H the hidden size. Numbers of
tokens are those of a micro-batch on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.planning.shapes import ModelShape
from verl.utils.buffer_sizes import chunk_bytes, grouping, working_bytes

# Layers whose parameters are gathered at the same time: the current one, the prefetched next one, and its copy.
_GATHERED_LAYERS = 3


@dataclass(frozen=True)
class FSDPModelMemory:
    """Memory of the model of one role, in bytes per rank."""

    shape: ModelShape
    kind: str = "causal_lm"
    """Kind of the head, `ModelKind`; others than causal_lm have one output per token."""
    compute_bytes: int = 2
    """Bytes of one element of the compute dtype."""
    shards: int = 1
    """Number of ranks that share one copy of the weights."""
    frozen: bool = False
    """Whether the model is never trained (reference, reward model)."""
    checkpointing: bool = True
    """Whether activations are recomputed in the backward pass (gradient checkpointing)."""
    compiled: bool = False
    """Whether layers are compiled by torch.compile in training."""
    reshard: bool | None = None
    """Whether gathered layers are freed after their forward pass; None: yes if weights are sharded."""
    moment_bytes: int = 4
    """Bytes of one optimizer moment of one parameter."""
    grad_offload: bool = False
    """Whether accumulated gradients are kept in host memory between micro-batches."""
    saved_keys_per_token: float = 1.0
    """Keys and values that attention saves for each computed token; above 1 if samples of a micro-batch share prefixes:
    attention copies those of the prefix."""
    device: str = "cuda"

    # ---------------------------------------------------------------- state between passes

    @property
    def has_adapters(self) -> bool:
        """Whether only LoRA adapters are trained."""
        return not self.frozen and self.shape.adapter_parameters is not None

    @property
    def trained_parameters(self) -> int:
        if self.frozen:
            return 0
        return self.shape.parameters if self.shape.adapter_parameters is None else self.shape.adapter_parameters

    def weights(self) -> float:
        """float32 master weights of trained parameters; frozen parameters in the compute dtype."""
        base = self.compute_bytes * self.shape.parameters if self.frozen or self.has_adapters else 0
        return (base + 4 * self.trained_parameters) / self.shards

    def moments(self) -> float:
        """The two moments of AdamW."""
        return 2 * self.moment_bytes * self.trained_parameters / self.shards

    def gradients(self) -> float:
        """Sharded gradients in float32."""
        return 4 * self.trained_parameters / self.shards

    def gradients_between_updates(self) -> float:
        """0: gradients are freed after an update."""
        return 0.0

    # ---------------------------------------------------------------- forward and backward passes

    def gathered(self) -> float:
        """Unsharded parameters in the compute dtype: those outside the layers during the whole pass, and a few layers.

        A single rank gathers nothing, but casts its float32 weights to the compute dtype; its frozen weights are
        already in that dtype and are not copied.
        """
        if self.shards == 1 and (self.frozen or self.has_adapters):
            return float(self.compute_bytes * self.trained_parameters)
        reshards, _ = grouping(self.shards, self.reshard)
        layers = self._parameters_per_layer * _GATHERED_LAYERS if reshards else self.shape.layer_parameters
        return self.compute_bytes * (self.shape.root_parameters + layers)

    def layer_activations(self) -> float:
        """Bytes per token that one layer saves for its backward pass.

        Eager: a norm saves its input in float32 (4H), the normalised value (cH, for the gradient of the weight) and its
        output (cH, saved by the projections); attention saves rotated queries and keys, values, its output (also saved
        by the next projection) and one float32 per head; the MLP saves gate (for the activation), activated gate and up
        (for the product) and the product (for the last projection). The residual addition saves nothing.

        Compiled: inputs and outputs of the norms, the tensors of attention, gate, up and their product; everything else
        is recomputed from these.
        """
        s, c = self.shape, self.compute_bytes
        norm = (8 + c if s.norm_in_float32 else 4 + 2 * c) * s.hidden
        attention = c * (2 * s.query_width + 2 * s.key_width * self.saved_keys_per_token) + 4 * s.heads
        if s.head_norms:
            attention += (4 + c) * (s.query_width + s.key_width)
        if self.compiled:
            return 4 * c * s.hidden + attention + (3 if s.gated else 2) * c * s.intermediate + 8
        return s.norms_per_layer * norm + attention + (4 if s.gated else 2) * c * s.intermediate

    def backward_temporaries(self) -> float:
        """Bytes per token in addition to saved activations: gradients inside the MLP, or of a norm in float32."""
        return max(2 * self.compute_bytes * self.shape.intermediate, 12 * self.shape.hidden)

    def inference_activations(self) -> float:
        """Peak bytes per token of a pass without gradient: residual, norm output and three MLP tensors, or the float32
        copies of a norm, or queries, keys, values, the output of attention and the keys and values it copies."""
        s, c = self.shape, self.compute_bytes
        peak: float = max((3 if s.gated else 2) * c * s.intermediate, 12 * s.hidden)
        if self.saved_keys_per_token > 1:
            peak = max(peak, 2 * c * (s.query_width + s.key_width * (1 + self.saved_keys_per_token)))
        return 2 * c * s.hidden + peak

    def inference(self, tokens: int, response_tokens: int) -> dict[str, float]:
        """Return the peak bytes of a pass without gradient, by part: over `tokens`, of which `response_tokens` get
        log-probs or values."""
        final_states = self.compute_bytes * self.shape.hidden * (tokens + response_tokens)
        layers, head = tokens * self.inference_activations(), self._logits(response_tokens)
        in_layers = {"activations": layers, "head": 0.0}
        in_head = {"activations": final_states, "head": head}
        return {"gathered": self.gathered(), **(in_layers if layers >= final_states + head else in_head)}

    def update(self, tokens: int, response_tokens: int, micro_batches: int) -> dict[str, float]:
        """Return the peak bytes of an optimizer step of `micro_batches` micro-batches, by part."""
        accumulates = micro_batches > 1
        if self.has_adapters:
            candidates = self._backward_peaks(tokens, response_tokens, accumulates)
        else:
            candidates = self._full_training_peaks(tokens, response_tokens, accumulates)
        return max(candidates, key=lambda parts: sum(parts.values()))

    # ---------------------------------------------------------------- candidates for the peak of an update

    def _full_training_peaks(self, tokens: int, response_tokens: int, accumulates: bool) -> list[dict[str, float]]:
        """Without adapters: gradients accumulate while activations are freed, so the peak is at the start or end of the
        backward pass, in the reduction of the gradients over ranks in float32, or in the optimizer."""
        s, c, parameters = self.shape, self.compute_bytes, self.shape.parameters
        accumulated = self._accumulated_gradients(accumulates)
        one_layer = tokens * (self.layer_activations() + self.backward_temporaries())
        embeddings = c * s.embedding_parameters
        tied = s.tied and self.kind == "causal_lm"
        _, one_group = grouping(self.shards, self.reshard)
        if one_group:
            # All gradients stay in the compute dtype until the end. That of the embedding is computed last, after the
            # layers; it is added to that of a tied head, which already exists.
            before_embedding = float(c * parameters - (0 if tied else embeddings))
            at_embedding = float(c * parameters + (embeddings if tied else 0))
            # Float32 gradients (accumulated or new) and a copy of them; then this copy and the result of the reduction.
            reduced = 8.0 * parameters
        else:
            # Per layer: new gradients, their float32 copy, the reduced gradients, and the copy of the previous layer.
            layer = (c + 8 + 4 / self.shards) * self._parameters_per_layer
            finished_layers = self.gradients() if not accumulated else 0.0
            before_embedding = at_embedding = finished_layers + c * s.root_parameters + layer
            reduced = (accumulated or self.gradients()) + (4 + max(c, 4 / self.shards)) * s.root_parameters
        gathered = self.gathered()
        optimizer_step = self.gradients() + self._optimizer_workspace()
        return [
            *self._backward_peaks(tokens, response_tokens, accumulates),
            {"gradients": accumulated + before_embedding, "gathered": gathered, "activations": one_layer, "head": 0.0},
            {"gradients": accumulated + at_embedding, "gathered": gathered, "activations": 0.0, "head": 0.0},
            {"gradients": reduced, "gathered": 0.0, "activations": 0.0, "head": 0.0},
            {"gradients": optimizer_step, "gathered": 0.0, "activations": 0.0, "head": 0.0},
        ]

    def _backward_peaks(self, tokens: int, response_tokens: int, accumulates: bool) -> list[dict[str, float]]:
        """Return the bytes by part at the start of a backward pass: in the head, and in the last layer."""
        s, c = self.shape, self.compute_bytes
        saved = tokens * self._saved_per_layer() * s.layers
        saved += tokens * (4 + 2 * c) * s.hidden + response_tokens * c * s.hidden + tokens * 2 * c * s.head_dim
        recomputed = self.layer_activations() if self.checkpointing else 0
        head = 0 if self.has_adapters or self.kind != "causal_lm" else c * s.embedding_parameters
        in_layer = saved + tokens * (recomputed + self.backward_temporaries())
        common = {"gathered": self.gathered(), "gradients": self._accumulated_gradients(accumulates)}
        return [
            {**common, "activations": saved, "head": self._head_backward(response_tokens)},
            {**common, "activations": in_layer, "head": float(head)},
        ]

    def _saved_per_layer(self) -> float:
        """Bytes per token that one layer saves until its backward pass: with checkpointing only its input, compiled
        layers also the output of attention and a float32 number per head."""
        if not self.checkpointing:
            return self.layer_activations()
        s, c = self.shape, self.compute_bytes
        return c * s.hidden + (c * s.query_width + 4 * s.heads if self.compiled else 0)

    def _accumulated_gradients(self, accumulates: bool) -> float:
        """Gradients of previous micro-batches on the device."""
        return self.gradients() if accumulates and not self.grad_offload else 0.0

    def _optimizer_workspace(self) -> float:
        """Return the temporary memory of an optimizer step whose moments are stored in bfloat16; 0 for float32."""
        if self.moment_bytes == 4:
            return 0.0
        embedding = self.shape.embedding_parameters // self.shards
        return float(working_bytes(self.trained_parameters // self.shards, embedding))

    # ---------------------------------------------------------------- parts

    @property
    def _parameters_per_layer(self) -> float:
        return self.shape.layer_parameters / self.shape.layers

    def _logits(self, response_tokens: int) -> float:
        """Bytes of the head in a forward pass: a chunk of logits, and five float32 numbers per row."""
        if self.kind != "causal_lm":
            return 4.0 * response_tokens
        chunk = chunk_bytes(response_tokens, self.shape.vocab, self.compute_bytes, self.device)
        return chunk + 20.0 * response_tokens

    def _head_backward(self, response_tokens: int) -> float:
        """Bytes of the head in a backward pass: a chunk of logits and its gradient, and the gradients of hidden states
        and head weights (the latter are accumulated in float32 if there are several chunks)."""
        if self.kind != "causal_lm":
            return 4.0 * response_tokens
        c, s = self.compute_bytes, self.shape
        chunk = chunk_bytes(response_tokens, s.vocab, c, self.device)
        several_chunks = chunk < response_tokens * s.vocab * max(4, c)
        weight = 0 if self.has_adapters else (4 + c if several_chunks else c) * s.embedding_parameters
        chunk_gradient = chunk * c / 4 if c < 4 else 0
        return self._logits(response_tokens) + chunk_gradient + response_tokens * c * s.hidden + weight
