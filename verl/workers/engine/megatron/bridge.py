"""Conversion of weights between Hugging Face and Megatron-Core by Megatron-Bridge, one full weight at a time.

The bridge's own distribution of weights over ranks is not used: it does not pad vocabularies, and its collectives on
Core's groups must not run during training, when an export runs in the background.
"""

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
from verl.models.loading import ModelKind
from verl.models.megatron_core import CoreArchitecture, CoreWeight, Piece, shard_slices, weight_map
from verl.types.weights import BucketTensors, RequestedRows, bucketed
from verl.workers.engine.common import groups
from verl.workers.engine.megatron.gathering import ModelCopy, RowRange, gather_everywhere, gather_on_rank0
from verl.workers.engine.megatron.weights import CoreWeights, HFFiles

logger = logging.getLogger(__name__)


def create_bridge(
    config: MegatronConfig, arch: CoreArchitecture, kind: ModelKind, hf_config: Any, device: torch.device
) -> Bridge | None:
    """Return the bridge of a model; None if `use_mbridge` is off or a rank cannot import the package. A collective.

    Must be called while no layout is active. ValueError for a model that the bridge does not support.
    """
    if not config.use_mbridge:
        return None
    error = _import_error()
    if groups.max_over_ranks(int(error is not None), device):
        if dist.get_rank() == 0:
            absent = isinstance(error, ModuleNotFoundError) and error.name == "megatron.bridge"
            level = logging.INFO if absent else logging.WARNING  # the configuration check reports a missing package
            cause = error or "not on every rank"
            logger.log(
                level, "use_mbridge: cannot import megatron-bridge (%s); using the built-in weight mapping.", cause
            )
        return None
    return Bridge(arch, kind, hf_config)


def _import_error() -> Exception | None:
    """Return the error of importing the bridge on this rank."""
    try:
        import megatron.bridge
        import megatron.bridge.models.conversion.model_bridge
        import megatron.bridge.models.conversion.param_mapping  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a broken Transformer Engine raises OSError and others
        return error
    return None


class WholeWeight(nn.Module):
    """A module with one unsharded weight, from which the bridge reads sizes."""

    def __init__(self, config: TransformerConfig, name: str, shape: tuple[int, ...], like: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        placeholder = torch.empty((), dtype=like.dtype, device=like.device).expand(shape)  # uses no memory
        self.register_parameter(name, nn.Parameter(placeholder, requires_grad=False))


class Bridge:
    """The bridge of one model. It does not support heads of value models and classifiers, which are copied."""

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
                self._mappings[weight.name] = _without_expert_index(registry.megatron_to_hf_lookup(weight.name))
                self._check(weight, arch, hf_config.model_type)

    def to_core(self, weight: CoreWeight, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return Core's full weight, unpadded, in the dtype of the tensors that `read` returns by Hugging Face name."""
        mapping = self._mappings.get(weight.copy_of or weight.name)
        tensors = {name: read(name) for name in weight.stored or weight.hf}
        (like, *_) = tensors.values()
        if mapping is None:
            return like
        modified = self._bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, tensors)
        return mapping.hf_to_megatron(modified, self._module(mapping, weight, like))

    def to_hf(self, weight: CoreWeight, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the Hugging Face tensors of Core's full weight, by their names on disk."""
        mapping = self._mappings.get(weight.copy_of or weight.name)
        if mapping is None:
            return {weight.hf[0]: whole}
        return mapping.megatron_to_hf(whole, self._module(mapping, weight, whole))

    def _module(self, mapping: Any, weight: CoreWeight, like: torch.Tensor) -> WholeWeight:
        return WholeWeight(self._config, mapping.megatron_param.rpartition(".")[2], weight.shape, like)

    def _check(self, weight: CoreWeight, arch: CoreArchitecture, family: str) -> None:
        """Convert the weight to Core and back on the meta device; ValueError if names or shapes differ.

        This first use also ensures that the mapping never communicates: it looks for Core's groups only now, while no
        layout is active.
        """
        mapping, shapes = self._mappings[weight.name], _shapes(weight, arch)
        if mapping is None or set(_names(mapping)) != set(shapes):
            raise _unsupported(family, weight.name)
        whole = self.to_core(weight, lambda name: torch.empty(shapes[name], device="meta"))
        back = {name: tuple(value.shape) for name, value in self.to_hf(weight, whole).items()}
        if tuple(whole.shape) != weight.shape or back != shapes:
            raise _unsupported(family, weight.name)


def _model_bridge(hf_config: Any) -> Any:
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return get_model_bridge(MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)])
    except (KeyError, NotImplementedError) as error:  # remote code, or an unsupported model family
        raise _unsupported(hf_config.model_type) from error


def _unsupported(family: str, weight: str | None = None) -> ValueError:
    what = f"this {family} model's {weight}" if weight is not None else f"{family} models"
    return ValueError(
        f"megatron_config.use_mbridge: Megatron-Bridge has no mapping for {what}. Set megatron_config.use_mbridge="
        "False to use the built-in mapping."
    )


def _without_expert_index(mapping: Any) -> Any:
    """Remove the expert index from the mapping's name: the bridge would communicate with all ranks for an expert."""
    if mapping is not None:
        mapping.megatron_param = re.sub(r"\.experts\.local_experts\.\d+\.", ".", mapping.megatron_param)
    return mapping


def _names(mapping: Any) -> list[str]:
    return list(mapping.hf_param.values()) if isinstance(mapping.hf_param, Mapping) else [mapping.hf_param]


def _shapes(weight: CoreWeight, arch: CoreArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the Hugging Face tensors on disk that form the full weight."""
    rows: dict[str, int] = {}
    for piece in shard_slices(weight, arch, 0, 1, stored=True):
        rows[piece.hf] = rows.get(piece.hf, 0) + piece.place[0].stop - piece.place[0].start
    return {name: (count, *weight.shape[1:]) for name, count in rows.items()}


Fetch = Callable[[CoreWeight], "torch.Tensor | None"]
"""Returns Core's full weight; None on a rank that only takes part in gathering it. A collective."""


class BridgedWeights(CoreWeights):
    """Weights that are gathered as Core's full weights, and then converted by the bridge.

    A rank therefore reads full tensors of which it keeps a part, and every rank of a copy receives all rows that any
    rank requests: at most the tensors of a layer at a time, in addition to its own weights.
    """

    requires_safetensors = True

    def __init__(self, bridge: Bridge, *args: Any) -> None:
        super().__init__(*args)
        self._bridge = bridge
        self._core_copies = self._copies(CoreWeight.unsharded)
        self._sources: dict[str, list[CoreWeight]] = {}  # Core's weights by Hugging Face name
        for weight in self.table.values():
            for name in weight.hf if weight.copy_of is None else ():
                self._sources.setdefault(name, []).append(weight)
        self._sources |= {name: self._sources[first] for name, first in self._tied.items()}

    def read(self, name: str, files: HFFiles, *, stored: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
        """See `CoreWeights.read`. ValueError for experts that are stored as one tensor."""
        weight, group = self.table[name], self._tensor_group(self.table[name])
        if weight.stored and not stored:
            raise ValueError(
                f"model.path: {weight.hf[0]} contains all experts, but Megatron-Bridge requires separate tensors. Set "
                "megatron_config.use_mbridge=False."
            )
        full = self._bridge.to_core(weight, lambda hf: files.read(hf, (slice(None),)))
        for piece in shard_slices(weight.unsharded(), self._arch, group.rank, group.size):
            yield piece, full[piece.source]

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None
    ) -> Iterator[BucketTensors]:
        """See `TrainEngine.buckets`."""
        ranges = self._row_ranges(dtype, max_bytes, requested)
        converters = {
            target: self._converter(partial(self._fetch_everywhere, target), (part.name for part in ranges))
            for target in {part.dtype for part in ranges}
        }
        for bucket in bucketed(((part, part.nbytes) for part in ranges), max_bytes):
            result: BucketTensors = {}
            for part in bucket:
                tensor = converters[part.dtype].rows(part.name, part.rows)
                assert tensor is not None
                rows = part.rows if requested is None else part.requested_by(requested[dist.get_rank()])
                if rows:
                    result |= part.keyed(rows, tensor[rows.start - part.rows.start : rows.stop - part.rows.start])
            yield result

    def gather_on_rank0(
        self, local_tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Callable[[str], torch.Tensor | None]:
        """See `NamedWeights.gather_on_rank0`."""

        def fetch(weight: CoreWeight) -> torch.Tensor | None:
            return gather_on_rank0(weight.name, weight.shape, self._core_copy(weight), local_tensors, dtype, group)

        converter = self._converter(fetch, self.manifest)
        return lambda name: converter.rows(name, range(self.manifest[name].shape[0]))

    def _converter(self, fetch: Fetch, requests: Iterable[str]) -> _Converter:
        return _Converter(self._bridge, self._sources, fetch, Counter(iter(requests)))

    def _fetch_everywhere(self, dtype: torch.dtype, weight: CoreWeight) -> torch.Tensor:
        part = RowRange(weight.name, weight.shape, dtype, range(weight.shape[0]))
        (full,) = gather_everywhere([part], self._core_copy(weight), self.live, self.device).values()
        return full

    def _core_copy(self, weight: CoreWeight) -> ModelCopy:
        return self._core_copies[weight.expert is not None]


@dataclass(frozen=True)
class _Converter:
    """Converts Core's weights to Hugging Face tensors, one after the other; a weight that contains several is fetched
    once."""

    bridge: Bridge
    sources: Mapping[str, Sequence[CoreWeight]]
    fetch: Fetch
    requests: Counter[str]
    """Remaining number of requests for each tensor."""
    converted: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def rows(self, name: str, rows: range) -> torch.Tensor | None:
        """Return rows of the tensor `name`."""
        weight, *_ = weights = self.sources[name]
        if weight.expert is not None:
            return self._experts(weights[rows.start : rows.stop])
        if name not in self.converted:
            full = self.fetch(weight)
            tensors = dict.fromkeys(weight.hf) if full is None else self.bridge.to_hf(weight, full)
            self.converted[name] = tensors.pop(name if name in tensors else weight.hf[0])  # a tied head: the embedding
            self.converted.update((other, tensor) for other, tensor in tensors.items() if self.requests[other])
        self.requests[name] -= 1
        tensor = self.converted[name] if self.requests[name] else self.converted.pop(name)
        return None if tensor is None else tensor[rows.start : rows.stop]

    def _experts(self, weights: Sequence[CoreWeight]) -> torch.Tensor | None:
        """Return the experts in one tensor, as transformers has them in memory."""
        stacked: torch.Tensor | None = None
        for number, weight in enumerate(weights):
            full = self.fetch(weight)
            if full is None:
                continue
            tensors = self.bridge.to_hf(weight, full)
            stacked = full.new_empty((len(weights), *full.shape)) if stacked is None else stacked
            torch.cat([tensors[name] for name in weight.stored], out=stacked[number])
        return stacked
