"""What runs in the workers of a `vllm serve` that is joined: they receive weights from a trainer's process.

Named on the server's command line: `--worker-extension-cls verl.workers.rollout.url_rollout.vllm_worker.WeightMember`.
"""

from __future__ import annotations

from typing import Any

import torch

from verl.utils.transfer_group import TransferAddress, TransferGroup
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.bucket_layout import BucketPiece, end_of
from verl.workers.rollout.vllm_rollout.worker import WeightReceiver

__all__ = ["SERVER_EXTENSION", "WeightMember"]

SERVER_EXTENSION = f"{__name__}.WeightMember"


class WeightMember(WeightReceiver):
    """A worker as a member of a transfer group. Called by name, with JSON."""

    rank: int
    _verl_group: TransferGroup

    def verl_describe(self) -> dict[str, Any]:
        """Which model this is a part of, and which device it is on."""
        model = self.vllm_config.model_config.hf_text_config.to_dict()
        plain = {name: value for name, value in model.items() if isinstance(value, int | str)}
        return {"model": plain, "device": device_name(self.device)}

    def verl_join(self, host: str, port: int, size: int, backend: str) -> None:
        """Meet the trainer's process there; a group that was before is given up."""
        self._verl_group = TransferGroup(TransferAddress(host, port), 1 + self.rank, size, backend, self.device)

    def verl_receive(self, pieces: list[dict[str, Any]]) -> dict[str, int]:
        """Take a bucket in; the fingerprints of what has come."""
        layout, group = [BucketPiece(**piece) for piece in pieces], self._verl_group
        flat = group.broadcast(torch.empty(end_of(layout), dtype=torch.uint8, device=group.device))
        tensors = {piece.name: piece.view(flat) for piece in layout}
        self.verl_load_weights(list(tensors.items()))
        return fingerprints(tensors)


def device_name(device: torch.device) -> str:
    """The same in every process that computes on it."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)
