"""Face: length balancing under the name users import; the pure functions live in `verl.utils.balancing`."""

from verl.utils.balancing import (
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    log_seqlen_unbalance,
    roundup_divisible,
)

__all__ = [
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "roundup_divisible",
]
