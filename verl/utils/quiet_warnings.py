"""Warnings of torch and numpy that a user can do nothing about: known by their words, and not shown."""

from __future__ import annotations

import re
import warnings

# (kind, how the message begins). A warning that names a remedy, or that is about a user's own code, is never here.
UNACTIONABLE: tuple[tuple[type[Warning], str], ...] = (
    # torch renames its collectives, and calls them by the old name itself.
    (FutureWarning, "`torch.distributed.all_gather_into_tensor` is deprecated"),
    (FutureWarning, "`torch.distributed.reduce_scatter_tensor` is deprecated"),
    # A CPU without bf16 instructions: torch takes its slower path by itself.
    (UserWarning, "mkldnn_matmul failed"),
)


def quiet_warnings() -> None:
    """Hide them in this process; every program and every worker of ours calls it once."""
    for kind, beginning in UNACTIONABLE:
        warnings.filterwarnings("ignore", message=re.escape(beginning), category=kind)
