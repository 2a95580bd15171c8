"""Weights whose way in from Hugging Face files, and out in buckets or an export, leads through Megatron-Bridge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl.models.core.weight_map import CoreWeight, Piece, shard_slices
from verl.types.weights import Wanted
from verl.workers.engine.common.weights import bucketed
from verl.workers.engine.megatron.gathering import Copy, Found, Strip, on_first_rank, spread
from verl.workers.engine.megatron.hf_files import HFFiles
from verl.workers.engine.megatron.mbridge import Bridge
from verl.workers.engine.megatron.weights import CoreWeights

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
