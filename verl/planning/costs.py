"""What one model takes of a device while it trains or infers: every formula of the memory plan, with its reason.

T is the number of tokens in a micro-batch on this rank, c the bytes of the compute dtype, H hidden, A and K the widths
of queries and keys, I the MLP's, V the vocabulary, N parameters, S the ranks that share one copy of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.models.fused_head import chunk_bytes
from verl.planning.shapes import ModelShape
from verl.workers.engine.common.optim import working_bytes
from verl.workers.engine.fsdp.sharding import grouping

# Layers whose parameters are gathered at once: the one that computes, the next one's transfer and its copy.
_GATHERED_LAYERS = 3


@dataclass(frozen=True)
class TrainedModel:
    """One role's model on its engine. Bytes on one rank; a frozen one (reference, reward model) only infers."""

    shape: ModelShape
    kind: str = "causal_lm"
    compute_bytes: int = 2
    shards: int = 1
    frozen: bool = False
    checkpointing: bool = True
    compiled: bool = False
    reshard: bool | None = None
    """Whether layers are freed after their forward pass; None: where weights are sharded."""
    state_bytes: int = 4
    """Of one moment of one parameter."""
    grad_offload: bool = False
    device: str = "cuda"

    # ---------------------------------------------------------------- what stays between passes

    @property
    def adapted(self) -> bool:
        return not self.frozen and self.shape.adapter_parameters is not None

    @property
    def learning(self) -> int:
        """Parameters that learn."""
        if self.frozen:
            return 0
        return self.shape.parameters if self.shape.adapter_parameters is None else self.shape.adapter_parameters

    def weights(self) -> float:
        """float32 masters of what learns; everything that is frozen in the compute dtype."""
        base = self.compute_bytes * self.shape.parameters if self.frozen or self.adapted else 0
        return (base + 4 * self.learning) / self.shards

    def moments(self) -> float:
        """AdamW's two."""
        return 2 * self.state_bytes * self.learning / self.shards

    def gradients(self) -> float:
        """float32 shards."""
        return 4 * self.learning / self.shards

    def resting_gradients(self) -> float:
        """They are there while an update runs only."""
        return 0.0

    # ---------------------------------------------------------------- while a pass runs

    def gathered(self) -> float:
        """Whole parameters in the compute dtype: those outside the layers for all of a pass, and a few layers.

        One rank has nothing to gather, but still casts.
        """
        freed, _ = grouping(self.shards, self.reshard)
        layers = self._layer * _GATHERED_LAYERS if freed else self.shape.layer_parameters
        return self.compute_bytes * (self.shape.root_parameters + layers)

    def layer_activations(self) -> float:
        """Bytes per token that one layer keeps for its backward pass, computed plainly.

        Norm: its input cast to float32 (4H), the normalised value (cH, for the weight's gradient), and its output
        (cH, which the projections keep). Attention: rotated queries and keys, values, its output (which the next
        projection keeps too), and one float32 per head. MLP: gate (for the activation), activated gate and up (for
        the product), product (for the last projection). The sum with the residual keeps nothing.

        Compiled: inputs and outputs of the norms, what attention needs, gate, up and their product; the rest is
        computed again from them.
        """
        s, c = self.shape, self.compute_bytes
        norm = (8 + c if s.norm_in_float32 else 4 + 2 * c) * s.hidden
        attention = c * (2 * s.query_width + 2 * s.key_width) + 4 * s.heads
        if s.head_norms:
            attention += (4 + c) * (s.query_width + s.key_width)
        if self.compiled:
            return 4 * c * s.hidden + attention + (3 if s.gated else 2) * c * s.intermediate + 8
        return s.norms_per_layer * norm + attention + (4 if s.gated else 2) * c * s.intermediate

    def backward_temporaries(self) -> float:
        """Bytes per token beyond what is kept: gradients inside the MLP, or a norm's in float32."""
        return max(2 * self.compute_bytes * self.shape.intermediate, 12 * self.shape.hidden)

    def inference_activations(self) -> float:
        """Bytes per token at the fullest moment of a pass without gradient: residual, norm output and the MLP's
        three products; or a norm's float32 copies."""
        s, c = self.shape, self.compute_bytes
        return 2 * c * s.hidden + max((3 if s.gated else 2) * c * s.intermediate, 12 * s.hidden)

    def inference(self, tokens: int, answers: int) -> dict[str, float]:
        """Parts of a pass without gradient over `tokens`, of which `answers` give log-probs or values."""
        ends = self.compute_bytes * self.shape.hidden * (tokens + answers)
        layers, head = tokens * self.inference_activations(), self._logits(answers)
        fullest = {"activations": layers, "head": 0.0} if layers >= ends + head else {"activations": ends, "head": head}
        return {"gathered": self.gathered(), **fullest}

    def update(self, tokens: int, answers: int, passes: int) -> dict[str, float]:
        """Parts at the fullest moment of an update.

        `passes`: micro-batches per optimizer step; of several, gradients of earlier ones are there already.
        """
        several = passes > 1
        moments = self._backward(tokens, answers, several) if self.adapted else self._whole(tokens, answers, several)
        return max(moments, key=lambda parts: sum(parts.values()))

    # ---------------------------------------------------------------- the moments of an update

    def _whole(self, tokens: int, answers: int, several: bool) -> list[dict[str, float]]:
        """Of a model that learns as a whole: new gradients pile up while activations go, so a backward pass is fullest
        when it begins or when it ends; then they are summed over ranks in float32, and then comes the step."""
        s, c, n = self.shape, self.compute_bytes, self.shape.parameters
        earlier = self._earlier(several)
        one_layer = tokens * (self.layer_activations() + self.backward_temporaries())
        embeddings = c * s.embedding_parameters
        tied = s.tied and self.kind == "causal_lm"
        _, one_group = grouping(self.shards, self.reshard)
        if one_group:
            # All gradients stay in the compute dtype to the end. The embedding's comes last, after the layers; that of
            # a head tied to it is there already, and they are added.
            new = float(c * n - (0 if tied else embeddings))
            last = float(c * n + (embeddings if tied else 0))
            # The float32 sums so far (or the new gradients) and their copy; then that copy and the result.
            summed = 8.0 * n
        else:
            # A layer's: new ones, their float32 copy, its sum, and the copy of the layer before it.
            layer = (c + 8 + 4 / self.shards) * self._layer
            done = self.gradients() if not earlier else 0.0
            new = last = done + c * s.root_parameters + layer
            summed = (earlier or self.gradients()) + (4 + max(c, 4 / self.shards)) * s.root_parameters
        gathered = self.gathered()
        return [
            *self._backward(tokens, answers, several),
            {"gradients": earlier + new, "gathered": gathered, "activations": one_layer, "head": 0.0},
            {"gradients": earlier + last, "gathered": gathered, "activations": 0.0, "head": 0.0},
            {"gradients": summed, "gathered": 0.0, "activations": 0.0, "head": 0.0},
            {"gradients": self.gradients() + self._working(), "gathered": 0.0, "activations": 0.0, "head": 0.0},
        ]

    def _backward(self, tokens: int, answers: int, several: bool) -> list[dict[str, float]]:
        """The beginning of a backward pass: in the head, and in the last layer."""
        s, c = self.shape, self.compute_bytes
        kept = tokens * (c * s.hidden if self.checkpointing else self.layer_activations()) * s.layers
        kept += tokens * (4 + 2 * c) * s.hidden + answers * c * s.hidden + tokens * 2 * c * s.head_dim
        again = self.layer_activations() if self.checkpointing else 0
        head = 0 if self.adapted or self.kind != "causal_lm" else c * s.embedding_parameters
        common = {"gathered": self.gathered(), "gradients": self._earlier(several)}
        return [
            {**common, "activations": kept, "head": self._head_backward(answers)},
            {**common, "activations": kept + tokens * (again + self.backward_temporaries()), "head": float(head)},
        ]

    def _earlier(self, several: bool) -> float:
        return self.gradients() if several and not self.grad_offload else 0.0

    def _working(self) -> float:
        if self.state_bytes == 4:
            return 0.0
        return float(working_bytes(self.learning // self.shards, self.shape.embedding_parameters // self.shards))

    # ---------------------------------------------------------------- parts

    @property
    def _layer(self) -> float:
        """Parameters of one layer."""
        return self.shape.layer_parameters / self.shape.layers

    def _logits(self, answers: int) -> float:
        """A chunk of them, and five numbers per row."""
        if self.kind != "causal_lm":
            return 4.0 * answers
        return chunk_bytes(answers, self.shape.vocab, self.compute_bytes, self.device) + 20.0 * answers

    def _head_backward(self, answers: int) -> float:
        """A chunk of logits and its gradient, that of hidden states, and the head's: float32 over several chunks."""
        if self.kind != "causal_lm":
            return 4.0 * answers
        c, s = self.compute_bytes, self.shape
        chunk = chunk_bytes(answers, s.vocab, c, self.device)
        several = chunk < answers * s.vocab * max(4, c)
        weight = 0 if self.adapted else (4 + c if several else c) * s.embedding_parameters
        return self._logits(answers) + (chunk * c / 4 if c < 4 else 0) + answers * c * s.hidden + weight
