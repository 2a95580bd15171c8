"""How trained weights reach the rollout engine: by buckets of HF-named tensors, versioned, verified bit for bit."""

from verl.utils.transfer_group import (
    TransferAddress,
    TransferGroup,
    TransferHost,
    TransferLostError,
)
from verl.workers.sharding_manager.transfer import (
    BroadcastReceiver,
    BroadcastSender,
    InProcessTransfer,
    SyncStats,
    WeightSource,
)

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
