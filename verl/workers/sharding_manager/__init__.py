"""Weight sync from training engines to rollout engines: buckets of HF-named tensors, versioned and verified."""

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
