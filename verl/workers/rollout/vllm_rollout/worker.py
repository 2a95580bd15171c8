"""What our weights need of vLLM's workers: methods that vLLM mixes into its worker class, in each of its processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from verl.workers.rollout.bucket_layout import end_of
from verl.workers.rollout.process.shared_buffer import BucketHandle, BufferReader

__all__ = ["WORKER_EXTENSION", "WeightReceiver"]

WORKER_EXTENSION = f"{__name__}.WeightReceiver"


class WeightReceiver:
    """Named tensors into the model, by vLLM's reload of layers: the path of its weight-transfer API.

    A layer is put together when all of its weights are there, repacked or quantised as at the first load, and copied to
    where captured graphs read it.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _verl_missing: set[str]
    _verl_updating = False

    def verl_begin_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._verl_updating:  # one that failed half-way: its layers are whole again before they are taken apart
            self.verl_finish_update()
        self._verl_updating = True
        model = self.model_runner.get_model()
        self._verl_missing = {name for name, _ in model.named_parameters()}
        if self.device.type == "cpu":
            _experts_are_packed_again(model)
        with self._verl_loading():
            initialize_layerwise_reload(model)

    def verl_load_weights(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Tensors of any device; they are only read during the call."""
        # vLLM keeps what it is given until the layer is whole.
        own = [(name, tensor.to(self.device, copy=True)) for name, tensor in tensors]
        with self._verl_loading():
            loaded = self.model_runner.get_model().load_weights(own)
        self._verl_missing -= set(loaded or ())

    def verl_load_shared(self, bucket: BucketHandle) -> None:
        """The same of a bucket in memory that the first rank can open, and tells the others of.

        Each of those would take a context on the first one's device to open it.
        """
        from vllm.distributed.parallel_state import get_world_group

        ranks, size = get_world_group(), end_of(bucket.pieces)
        with closing(BufferReader()) as reader:
            if ranks.rank_in_group == 0:
                flat = reader.open(bucket.buffer).flat[:size]
            else:
                flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            ranks.broadcast(flat, src=0)
            self.verl_load_weights([(piece.name, piece.view(flat)) for piece in bucket.pieces])
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # the next bucket overwrites it

    def verl_finish_update(self) -> list[str]:
        """The names of vLLM's weights that got no value."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with self._verl_loading():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.device.type == "cpu":
                _pack_tied_layers(model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._verl_updating = False
        return sorted(self._verl_missing)

    def verl_weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model_runner.get_model().parameters())

    def verl_kv_bytes(self) -> int:
        caches = tree_leaves(list(getattr(self.model_runner, "kv_caches", ())))
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
        return sum(storages.values())

    @contextmanager
    def _verl_loading(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.device(self.device), torch.no_grad():
            yield


# On a CPU vLLM computes with packed copies of weights. Two of them its reload leaves as they were (seen in 0.32).


def _experts_are_packed_again(model: nn.Module) -> None:
    """Experts are packed where their kernel is made: without one, the reload makes it again."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _pack_tied_layers(model: nn.Module) -> None:
    """A layer that has its weight from another one is given nothing, and packs nothing."""
    owners: dict[int, list[Any]] = {}
    for layer in model.modules():
        if isinstance(getattr(layer, "weight", None), nn.Parameter):
            owners.setdefault(id(layer.weight), []).append(layer)
    for layers in owners.values():
        for layer in layers[1:]:
            layer.quant_method.process_weights_after_loading(layer)
