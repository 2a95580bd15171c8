"""Alias of length balancing (`verl.utils.balancing`) and dynamic micro-batches, under the names that users import."""

from verl.utils.balancing import (
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    log_seqlen_unbalance,
    roundup_divisible,
)
from verl.workers.engine.common.micro_batches import (
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)

__all__ = [
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "roundup_divisible",
]
