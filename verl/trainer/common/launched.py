"""Whether torchrun started this process, and as which of how many."""

from __future__ import annotations

import os


def launched_ranks() -> tuple[int, int, int] | None:
    """(this process's rank, nodes, ranks per node) of a launch of several by torchrun; None: there is none."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or ranks == 1:
        return None
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ["RANK"]), ranks // here, here
