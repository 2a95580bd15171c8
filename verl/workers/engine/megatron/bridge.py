"""Weights converted between Hugging Face and Megatron-Core by Megatron-Bridge."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from verl.config.engine import MegatronConfig
from verl.models.core.architecture import CoreArchitecture
from verl.models.core.weight_map import CoreWeight, Piece, shard_slices, weight_map
from verl.models.loading import ModelKind
from verl.types.weights import Wanted
from verl.workers.engine.common import groups
from verl.workers.engine.common.weights import bucketed
from verl.workers.engine.megatron.gathering import Copy, Found, Strip, on_first_rank, spread
from verl.workers.engine.megatron.weights import CoreWeights, HFFiles

logger = logging.getLogger(__name__)


def bridge_of(
    config: MegatronConfig, arch: CoreArchitecture, kind: ModelKind, hf_config: Any, device: torch.device
) -> Bridge | None:
    """None where `use_mbridge` is off or a rank cannot import the package: our own tables do the same. A collective.

    To be called while no layout is active. ValueError for a model that the bridge does not map.
    """
    if not config.use_mbridge:
        return None
    error = _import_error()
    if groups.largest(int(error is not None), device):
        if dist.get_rank() == 0:
            absent = isinstance(error, ModuleNotFoundError) and error.name == "megatron.bridge"
            level = logging.INFO if absent else logging.WARNING  # that it is absent, the configuration's check has said
            why = error or "not on every rank"
            logger.log(level, "use_mbridge: no megatron-bridge (%s); our own tables map the weights.", why)
        return None
    return Bridge(arch, kind, hf_config)


def _import_error() -> Exception | None:
    """What keeps this rank from importing the conversion."""
    try:
        import megatron.bridge
        import megatron.bridge.models.conversion.model_bridge
        import megatron.bridge.models.conversion.param_mapping  # noqa: F401
    except Exception as error:  # noqa: BLE001 - Transformer Engine raises OSError and others where its library is broken
        return error
    return None


class WholeWeight(nn.Module):
    """A module as the bridge looks at it for sizes: all of one weight is on this rank."""

    def __init__(self, config: TransformerConfig, name: str, shape: tuple[int, ...], like: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        place = torch.empty((), dtype=like.dtype, device=like.device).expand(shape)  # takes no memory
        self.register_parameter(name, nn.Parameter(place, requires_grad=False))


class Bridge:
    """Of one model. The head of a value model or classifier, which the bridge does not know, is copied as it is."""

    def __init__(self, arch: CoreArchitecture, kind: ModelKind, hf_config: Any) -> None:
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        AutoMapping.register_module_type(WholeWeight.__name__, "replicated")
        self._bridge = _model_bridge(hf_config)
        self._config = TransformerConfig(
            num_layers=arch.layers,
            hidden_size=arch.hidden,
            num_attention_heads=arch.heads,
            num_query_groups=arch.kv_heads,
            kv_channels=arch.head_dim,
            num_moe_experts=arch.experts.count if arch.experts is not None else None,
        )
        registry = self._bridge.mapping_registry()
        self._mappings: dict[str, Any] = {}
        for weight in weight_map(arch, kind):
            if weight.copy_of is None and not weight.name.startswith("score."):
                self._mappings[weight.name] = _of_one_rank(registry.megatron_to_hf_lookup(weight.name))
                self._try_out(weight, arch, hf_config.model_type)

    def to_core(self, weight: CoreWeight, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The whole weight, without padding, in the type of what `read` gives by Hugging Face name."""
        mapping = self._mappings.get(weight.copy_of or weight.name)
        tensors = {name: read(name) for name in weight.stored or weight.hf}
        (like, *_) = tensors.values()
        if mapping is None:
            return like
        found = self._bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, tensors)
        return mapping.hf_to_megatron(found, self._module(mapping, weight, like))

    def to_hf(self, weight: CoreWeight, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """What it is made of, by the names that checkpoints on disk have."""
        mapping = self._mappings.get(weight.copy_of or weight.name)
        if mapping is None:
            return {weight.hf[0]: whole}
        return mapping.megatron_to_hf(whole, self._module(mapping, weight, whole))

    def _module(self, mapping: Any, weight: CoreWeight, like: torch.Tensor) -> WholeWeight:
        return WholeWeight(self._config, mapping.megatron_param.rpartition(".")[2], weight.shape, like)

    def _try_out(self, weight: CoreWeight, arch: CoreArchitecture, family: str) -> None:
        """There and back on the meta device; ValueError where names or shapes are not those of the model.

        It also settles that the mapping never talks to other ranks: it looks for Core's groups on its first use.
        """
        mapping, shapes = self._mappings[weight.name], _shapes(weight, arch)
        if mapping is None or set(_names(mapping)) != set(shapes):
            raise _refusal(family, weight.name)
        whole = self.to_core(weight, lambda name: torch.empty(shapes[name], device="meta"))
        back = {name: tuple(value.shape) for name, value in self.to_hf(weight, whole).items()}
        if tuple(whole.shape) != weight.shape or back != shapes:
            raise _refusal(family, weight.name)


def _model_bridge(hf_config: Any) -> Any:
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return get_model_bridge(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)])
    except (KeyError, NotImplementedError) as error:  # a config class of the model's own, a family it does not know
        raise _refusal(hf_config.model_type) from error


def _refusal(family: str, weight: str | None = None) -> ValueError:
    what = f"this {family} model's {weight}" if weight is not None else f"{family} models"
    return ValueError(
        f"megatron_config.use_mbridge: Megatron-Bridge has no mapping for {what}. Set megatron_config.use_mbridge="
        "False: our own tables have one."
    )


def _of_one_rank(mapping: Any) -> Any:
    """Named as a dense layer's: the bridge would ask all ranks for an expert that it knows to be one."""
    if mapping is not None:
        mapping.megatron_param = re.sub(r"\.experts\.local_experts\.\d+\.", ".", mapping.megatron_param)
    return mapping


def _names(mapping: Any) -> list[str]:
    return list(mapping.hf_param.values()) if isinstance(mapping.hf_param, Mapping) else [mapping.hf_param]


def _shapes(weight: CoreWeight, arch: CoreArchitecture) -> dict[str, tuple[int, ...]]:
    """Of the Hugging Face tensors on disk that the whole weight is made of."""
    rows: dict[str, int] = {}
    for piece in shard_slices(weight, arch, 0, 1, stored=True):
        rows[piece.hf] = rows.get(piece.hf, 0) + piece.place[0].stop - piece.place[0].start
    return {name: (count, *weight.shape[1:]) for name, count in rows.items()}


Fetch = Callable[[CoreWeight], "torch.Tensor | None"]


class BridgedWeights(CoreWeights):
    """Ranks put whole weights of Core's together, as `CoreWeights` does Hugging Face's; the bridge converts those.

    So a rank reads all of a tensor of which it keeps a part, and every rank of a copy gets all of what any of them
    wants: at most the tensors of a layer at a time beside its own weights.
    """

    only_files = True

    def __init__(self, bridge: Bridge, *given: Any) -> None:
        super().__init__(*given)
        self._bridge = bridge
        self._whole_copies = self._copies(CoreWeight.as_one)
        self._made_of: dict[str, list[CoreWeight]] = {}
        for weight in self.table.values():
            for name in weight.hf if weight.copy_of is None else ():
                self._made_of.setdefault(name, []).append(weight)
        self._made_of |= {name: self._made_of[first] for name, first in self._tied.items()}

    def read(self, name: str, files: HFFiles, *, stored: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
        """See `CoreWeights`. ValueError for experts that are stored as one tensor."""
        weight, place = self.table[name], self._place(self.table[name])
        if weight.stored and not stored:
            raise ValueError(
                f"model.path: {weight.hf[0]} holds all experts, and Megatron-Bridge reads each from tensors of its "
                "own. Set megatron_config.use_mbridge=False."
            )
        whole = self._bridge.to_core(weight, lambda hf: files.read(hf, (slice(None),)))
        for piece in shard_slices(weight.as_one(), self._arch, place.rank, place.size):
            yield piece, whole[piece.source]

    def buckets(self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None) -> Iterator[Found]:
        """See `TrainEngine.buckets`."""
        strips = self._strips(dtype, max_bytes, wanted)
        makings = {
            each: self._making(partial(self._everywhere, each), (strip.name for strip in strips))
            for each in {strip.dtype for strip in strips}
        }
        for bucket in bucketed(((strip, strip.size) for strip in strips), max_bytes):
            found: Found = {}
            for strip in bucket:
                made = makings[strip.dtype].rows(strip.name, strip.rows)
                assert made is not None
                rows = strip.rows if wanted is None else strip.wanted_by(wanted[dist.get_rank()])
                if rows:
                    found |= strip.keyed(rows, made[rows.start - strip.rows.start : rows.stop - strip.rows.start])
            yield found

    def whole(
        self, everything: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """See `CoreWeights`."""

        def fetch(weight: CoreWeight) -> torch.Tensor | None:
            return on_first_rank(weight.name, weight.shape, self._whole_copy(weight), everything, dtype, group)

        making = self._making(fetch, self.manifest)
        return lambda name: making.rows(name, range(self.manifest[name].shape[0]))

    def _making(self, fetch: Fetch, asked: Iterable[str]) -> _Making:
        return _Making(self._bridge, self._made_of, fetch, Counter(iter(asked)))

    def _everywhere(self, dtype: torch.dtype, weight: CoreWeight) -> torch.Tensor:
        strip = Strip(weight.name, weight.shape, dtype, range(weight.shape[0]))
        (whole,) = spread([strip], self._whole_copy(weight), self.live, self.device).values()
        return whole

    def _whole_copy(self, weight: CoreWeight) -> Copy:
        return self._whole_copies[weight.expert is not None]


@dataclass(frozen=True)
class _Making:
    """Hugging Face tensors, one after the other; a weight that several are made of is brought here once."""

    bridge: Bridge
    made_of: Mapping[str, Sequence[CoreWeight]]
    fetch: Fetch
    """A whole weight, or None on a rank that only helps to bring it to another. A collective."""
    asked: Counter[str]
    """How often each tensor is still asked for."""
    made: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def rows(self, name: str, rows: range) -> torch.Tensor | None:
        """Of the tensor `name`."""
        weight, *_ = weights = self.made_of[name]
        if weight.expert is not None:
            return self._experts(weights[rows.start : rows.stop])
        if name not in self.made:
            whole = self.fetch(weight)
            found = dict.fromkeys(weight.hf) if whole is None else self.bridge.to_hf(weight, whole)
            self.made[name] = found.pop(name if name in found else weight.hf[0])  # a tied head: the embedding
            self.made.update((other, tensor) for other, tensor in found.items() if self.asked[other])
        self.asked[name] -= 1
        tensor = self.made[name] if self.asked[name] else self.made.pop(name)
        return None if tensor is None else tensor[rows.start : rows.stop]

    def _experts(self, weights: Sequence[CoreWeight]) -> torch.Tensor | None:
        """All in one tensor, as transformers has them in memory."""
        found: torch.Tensor | None = None
        for number, weight in enumerate(weights):
            whole = self.fetch(weight)
            if whole is None:
                continue
            own = self.bridge.to_hf(weight, whole)
            found = whole.new_empty((len(weights), *whole.shape)) if found is None else found
            torch.cat([own[name] for name in weight.stored], out=found[number])
        return found
