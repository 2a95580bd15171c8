"""How trained weights reach the rollout engine: by buckets of HF-named tensors, versioned, verified bit for bit."""

from verl.utils.transfer_group import (
    TransferAddress,
    TransferGroup,
    TransferHost,
    TransferLostError,
)
from verl.workers.sharding_manager.base import SyncStats, WeightSource
from verl.workers.sharding_manager.broadcast import BroadcastReceiver, BroadcastSender
from verl.workers.sharding_manager.in_process import InProcessTransfer

__all__ = [
    "BroadcastReceiver",
    "BroadcastSender",
    "InProcessTransfer",
    "SyncStats",
    "TransferAddress",
    "TransferGroup",
    "TransferHost",
    "TransferLostError",
    "WeightSource",
]
