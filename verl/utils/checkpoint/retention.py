"""Which steps stay: those, or parts of them (actor, critic), over their limits are deleted, oldest first."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from verl.utils.checkpoint.locks import deleter_lock
from verl.utils.checkpoint.manifest import MANIFEST, damaged_files, drop_part
from verl.utils.checkpoint.steps import fetched, hidden, manifest_of, newest_first

logger = logging.getLogger(__name__)

WHOLE = "."


def retire(root: Path, newest: Path, limits: Mapping[str, int | None]) -> None:
    """Delete what is over the limits: part -> how many steps keep it (None: all); `WHOLE` is the step itself.

    A step goes when none of its parts stays. `newest`, folders that are not ours and steps being read are left alone;
    damaged steps do not count.
    """
    older = 0
    limited = any(limit is not None for limit in limits.values())
    for folder in newest_first(root) if limited else []:
        manifest = manifest_of(folder)
        if manifest is None:
            continue
        stays = {part for part, limit in limits.items() if limit is None or older < limit}
        older += not damaged_files(folder, manifest, contents=False)
        if folder == newest:
            continue
        if not any(manifest.has_part(part) for part in stays):
            _delete_unless_read(folder, root)
            continue
        for part in sorted(limits.keys() - stays):
            # Listed no more but still there: killed between the two.
            if manifest.has_part(part) or (folder / part).exists():
                _delete_unless_read(folder, root, part)
    # Fetched copies were there to start from; their originals stay at the remote, and a newer step is here now.
    for folder in fetched(root):
        _delete_unless_read(folder, root)


def _delete_unless_read(folder: Path, root: Path, part: str = WHOLE) -> None:
    doomed = folder / part
    with deleter_lock(folder / MANIFEST) as unread:
        if not unread:
            logger.info("%s is over the limit but being read; it stays for now", doomed)
            return
        if part != WHOLE:
            # The manifest first: killed in between, the step has files too many, not files missing.
            drop_part(folder, part)
        if doomed.exists():
            # Under another name first: deleting takes time, and a half-deleted step must not look like a damaged one.
            renamed = hidden(root, folder.name, "del")
            os.rename(doomed, renamed)
            shutil.rmtree(renamed, ignore_errors=True)
