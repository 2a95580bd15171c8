"""The shape of a model as the megatron engine divides it, and how it lies on ranks: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.engine import MegatronConfig
from verl.models.core.architecture import CoreArchitecture
from verl.models.core.pipeline import stage_layers


@dataclass(frozen=True)
class CoreShape:
    """Sizes of one transformer, as far as ranks divide them."""

    layers: int
    hidden: int
    heads: int
    query_width: int
    key_width: int
    ffn: int
    vocab: int
    tied: bool
    attention: int
    """Parameters of a layer's attention, which tensor ranks divide."""
    whole: int
    """Parameters of a layer that every rank has: norms."""
    head_norms: bool = False
    sparse: tuple[bool, ...] = ()
    """Of each layer, whether it has experts; none of them where this is empty."""
    experts: int = 0
    per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0

    @classmethod
    def of(cls, arch: CoreArchitecture) -> CoreShape:
        query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        rows = query + 2 * key
        bias = rows if arch.qkv_bias else 0
        output = arch.hidden if arch.linear_bias else 0
        sparse = arch.experts
        return cls(
            layers=arch.layers,
            hidden=arch.hidden,
            heads=arch.heads,
            query_width=query,
            key_width=key,
            ffn=arch.ffn,
            vocab=arch.vocab,
            tied=arch.tied,
            attention=(rows + query) * arch.hidden + bias,
            whole=2 * arch.hidden + output + (2 * arch.head_dim if arch.qk_norm else 0),
            head_norms=arch.qk_norm,
            sparse=sparse.layers if sparse else (),
            experts=sparse.count if sparse else 0,
            per_token=sparse.per_token if sparse else 0,
            expert_ffn=sparse.ffn if sparse else 0,
            shared_ffn=sparse.shared_ffn if sparse else 0,
        )

    def is_sparse(self, layer: int) -> bool:
        return bool(self.sparse) and self.sparse[layer]

    @property
    def parameters(self) -> int:
        """Of the whole model, with a head for tokens."""
        one = CoreSizes(world=1)
        layers = sum(sum(self.layer_parameters(layer, one)) for layer in range(self.layers))
        return int(layers) + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    def layer_parameters(self, layer: int, sizes: CoreSizes) -> tuple[float, float]:
        """On one rank: those outside the experts, and those of its experts."""
        dense = self.attention / sizes.tp + self.whole
        if not self.is_sparse(layer):
            return dense + 3 * self.hidden * self.ffn / sizes.tp, 0.0
        gate = self.hidden if self.shared_ffn else 0
        dense += self.experts * self.hidden + gate + 3 * self.hidden * self.shared_ffn / sizes.tp
        return dense, 3 * self.hidden * self.expert_ffn * self.experts / (sizes.ep * sizes.etp)


@dataclass(frozen=True)
class CoreSizes:
    """How a model lies on its ranks."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, config: MegatronConfig, world: int) -> CoreSizes:
        first, last = config.outer_stages()
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
        )

    @property
    def dp(self) -> int:
        return max(1, self.world // (self.tp * self.pp * self.cp))

    @property
    def copies(self) -> int:
        """Ranks that hold the same weights outside the experts."""
        return self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        return max(1, self.world // (self.etp * self.ep * self.pp))

    @property
    def token_ranks(self) -> int:
        """Ranks that share the tokens of a pass between layers, beside context ranks."""
        return self.tp if self.sequence_parallel else 1

    def stages(self, layers: int) -> list[list[range]]:
        """Layers of each stage, chunk by chunk."""
        return stage_layers(layers, self.pp, self.vpp, first=self.first, last=self.last)

    def in_flight(self, stage: int, passes: int) -> float:
        """Micro-batches whose activations a stage holds at most, in whole stages' worth (1F1B; interleaved: Narayanan
        et al., arXiv 2104.04473)."""
        if self.vpp == 1:
            return min(passes, self.pp - stage)
        warm = 2 * (self.pp - stage - 1) + (self.vpp - 1) * self.pp + 1
        return min(passes * self.vpp, warm) / self.vpp

    def bubble(self, passes: int) -> float:
        """Share of a step in which a stage waits for others."""
        return (self.pp - 1) / (self.vpp * passes + self.pp - 1)
