"""What one model takes of a device while it trains or infers: every formula of the memory plan, with its reason.

T is the number of tokens in a micro-batch on this rank, c the bytes of the compute dtype, H hidden, A and K the widths
of queries and keys, I the MLP's, V the vocabulary, N parameters, S the ranks that share one copy of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.planning.shapes import ModelShape

GB = 2**30


@dataclass(frozen=True)
class Costs:
    """Constants that were measured, in bytes unless said otherwise; everything else follows from shapes."""

    context: int = int(0.6 * GB)
    """A process on a GPU: driver context, library workspaces."""
    collectives: int = int(0.4 * GB)
    """Buffers of nccl where several ranks work together."""
    graphs: int = int(0.3 * GB)
    """Captured graphs and tables of the rollout engine."""
    slack: float = 0.03
    """Share of what torch allocates that is lost between blocks."""
    logit_chunk: dict[str, int] = field(default_factory=lambda: {"cuda": 1 << 30, "cpu": 64 << 20})
    """Logits held at once by the output head (`verl.models.fused_head.CHUNK_BYTES`)."""
    gathered_layers: int = 3
    """Layers whose parameters are gathered at once: the one that computes, the next one's transfer and its copy."""
    working_elements: int = 1 << 25
    """Elements whose bf16 moments are in float32 at a time in an optimizer step."""


COSTS = Costs()


@dataclass(frozen=True)
class TrainedModel:
    """One role's model on its engine. Bytes on one rank; a frozen one (reference, reward model) only infers."""

    shape: ModelShape
    kind: str = "causal_lm"
    compute_bytes: int = 2
    shards: int = 1
    frozen: bool = False
    trained_parameters: int | None = None
    """Those of LoRA adapters; None: all."""
    checkpointing: bool = True
    compiled: bool = False
    reshard: bool | None = None
    """Whether layers are freed after their forward pass; None: where weights are sharded."""
    state_bytes: int = 4
    """Of one moment of one parameter."""
    grad_offload: bool = False
    device: str = "cuda"
    costs: Costs = COSTS

    # ---------------------------------------------------------------- what stays between passes

    @property
    def parameters(self) -> int:
        return self.shape.parameters(self.kind)

    @property
    def learning(self) -> int:
        """Parameters that learn."""
        if self.frozen:
            return 0
        return self.parameters if self.trained_parameters is None else self.trained_parameters

    def weights(self) -> float:
        """float32 masters of what learns; everything that is frozen in the compute dtype."""
        if self.frozen:
            return self.compute_bytes * self.parameters / self.shards
        base = 0 if self.trained_parameters is None else self.compute_bytes * self.parameters
        return (base + 4 * self.learning) / self.shards

    def moments(self) -> float:
        """AdamW's two."""
        return 2 * self.state_bytes * self.learning / self.shards

    def gradients(self) -> float:
        """float32 shards."""
        return 4 * self.learning / self.shards

    # ---------------------------------------------------------------- while a pass runs

    def gathered(self) -> float:
        """Whole parameters in the compute dtype: those outside the layers for all of a pass, and a few layers.

        One rank has nothing to gather, but still casts: the layer that computes, or everything at once.
        """
        c, layers = self.compute_bytes, self.shape.layer_parameters
        root = c * self.shape.root_parameters(self.kind)
        if not self._reshards:
            return root + c * layers
        return root + c * layers / self.shape.layers * (1 if self.shards == 1 else self.costs.gathered_layers)

    @property
    def _reshards(self) -> bool:
        return self.shards > 1 if self.reshard is None else self.reshard

    @property
    def _last_group(self) -> int:
        """Parameters whose gradients are summed together at the end: those outside the layers, or all on one rank."""
        if self.trained_parameters is not None:
            return self.trained_parameters
        whole = self.shards == 1 and not self._reshards
        return self.parameters if whole else self.shape.root_parameters(self.kind)

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
        c, hidden = self.compute_bytes, self.shape.hidden
        head = c * hidden * (tokens + answers) + self._logits(answers)
        inside = tokens * self.inference_activations()
        return {
            "gathered": self.gathered(),
            "activations": inside if inside >= head else c * hidden * (tokens + answers),
            "head": 0.0 if inside >= head else self._logits(answers),
        }

    def update(self, tokens: int, answers: int, several: bool) -> dict[str, float]:
        """Parts at the fullest moment of an update: when the backward pass begins, when it ends, or in the step.

        `several`: micro-batches per optimizer step, so that gradients of earlier ones are there already.
        """
        s, c = self.shape, self.compute_bytes
        layer = self._layer_gradients()
        root = c * s.root_parameters(self.kind) if self.trained_parameters is None else 0
        kept = tokens * (c * s.hidden if self.checkpointing else self.layer_activations()) * s.layers
        kept += tokens * (4 + 2 * c) * s.hidden + answers * c * s.hidden + tokens * 2 * c * s.head_dim
        one_layer = tokens * (self.backward_temporaries() + (self.layer_activations() if self.checkpointing else 0))
        earlier = self.gradients() if several and not self.grad_offload else 0.0
        last = self._last_group
        # float32 in and out of the sum over ranks; the sum's outputs become the gradients where there are none yet.
        summed = 4 * last + (earlier + 4 * last / self.shards if earlier else self.gradients())
        if last == self.parameters:  # one group: what was added up before goes into the sum, and is freed with it
            summed = (8 + c) * last
        gathered = self.gathered()
        moments = [
            {"gradients": earlier, "gathered": gathered, "activations": kept, "head": self._head_backward(answers)},
            {"gradients": earlier + root, "gathered": gathered, "activations": kept + one_layer + layer, "head": 0.0},
            {"gradients": summed, "gathered": 0.0, "activations": 0.0, "head": 0.0},
            {"gradients": self.gradients() + self._working_moments(), "gathered": 0.0, "activations": 0.0, "head": 0.0},
        ]
        return max(moments, key=lambda parts: sum(parts.values()))

    # ---------------------------------------------------------------- parts

    def _layer_gradients(self) -> float:
        """Of one layer, whole: in the compute dtype, and in float32 for the sum over ranks if it has one of its own."""
        if self.trained_parameters is not None:
            return 0.0
        each = self.compute_bytes + (4 if self._last_group < self.parameters else 0)
        return each * self.shape.layer_parameters / self.shape.layers

    def _logits(self, answers: int) -> float:
        if self.kind != "causal_lm":
            return 4.0 * answers
        return self._logit_chunk(answers) + 20.0 * answers

    def _logit_chunk(self, answers: int) -> float:
        """Logits are float32 at least, whatever the compute dtype."""
        return min(float(answers) * self.shape.vocab * 4, self.costs.logit_chunk[self.device])

    def _head_backward(self, answers: int) -> float:
        """A chunk of logits and its gradient, that of hidden states, and the head's: float32 over several chunks."""
        if self.kind != "causal_lm":
            return 4.0 * answers
        c, head = self.compute_bytes, self.shape.vocab * self.shape.hidden
        learns = self.trained_parameters is None
        several = float(answers) * self.shape.vocab * 4 > self.costs.logit_chunk[self.device]
        weight = (4 + c if several else c) * head if learns else 0
        gradient = self._logit_chunk(answers) * (c / 4 if c < 4 else 0)
        return self._logits(answers) + gradient + answers * c * self.shape.hidden + weight

    def _working_moments(self) -> float:
        """bf16 moments are float32 in a step, portion by portion, with as much noise to round them."""
        if self.state_bytes == 4 or not self.learning:
            return 0.0
        largest = max(self.shape.vocab * self.shape.hidden / self.shards, self.costs.working_elements)
        return 16 * min(largest, self.learning / self.shards)
