"""Extension of the workers of a `vllm serve` that receives weights from a trainer's process.

On the server's command line: `--worker-extension-cls verl.workers.rollout.url_rollout.vllm_worker.WeightMember`.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.utils.transfer_group import TransferAddress, TransferGroup
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.vllm_rollout.vllm_rollout import WeightReceiver
from verl.workers.rollout.weights import BucketPiece, layout_bytes

SERVER_EXTENSION = f"{__name__}.WeightMember"


class WeightMember(WeightReceiver):
    """A worker as a member of a transfer group. Its methods are called by name, with JSON arguments."""

    rank: int
    _verl_group: TransferGroup | None = None

    def verl_describe(self) -> dict[str, Any]:
        """The worker's model configuration and device."""
        model = self.vllm_config.model_config.hf_text_config.to_dict()
        plain = {name: value for name, value in model.items() if isinstance(value, int | str)}
        return {"model": plain, "device": device_name(self.device)}

    def verl_join(self, host: str, port: int, size: int, backend: str) -> None:
        """Join the transfer group of the trainer's process, in place of an earlier group."""
        if self._verl_group is not None:
            self._verl_group.abort()
        self._verl_group = TransferGroup(TransferAddress(host, port), 1 + self.rank, size, backend, self.device)

    def verl_receive(self, pieces: list[dict[str, Any]]) -> dict[str, int]:
        """Receive and load a bucket; return the fingerprints of its tensors."""
        layout, group = [BucketPiece(**piece) for piece in pieces], self._verl_group
        assert group is not None, "requires verl_join"
        flat = group.broadcast(torch.empty(layout_bytes(layout), dtype=torch.uint8, device=group.device))
        tensors = {piece.name: piece.view(flat) for piece in layout}
        self.verl_load_weights(list(tensors.items()))
        return fingerprints(tensors)


def device_name(device: torch.device) -> str:
    """A name of the device that is the same in every process."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)
