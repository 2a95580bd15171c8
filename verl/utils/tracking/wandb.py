"""Metrics for Weights & Biases."""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from verl.utils.tracking.hosted import Hosted
from verl.utils.tracking.tracker import Generation, Run


class Wandb(Hosted):
    """A run that is gone on with after a restart."""

    package = "wandb"

    def resumed(self, run: Run) -> dict[str, Any]:
        """The id of the run to go on with, kept beside its other records; a run that begins anew gets a new one, but
        that of the same command (VERL_RUN) where it died before its first checkpoint and was started again.

        wandb takes no second value for a step it has: steps that are done again keep their first.
        """
        if run.first_step is None:
            return {}
        file = run.directory / "wandb_id"
        if run.first_step == 0 or not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(os.environ.get("VERL_RUN") or uuid.uuid4().hex[:12])
        return {"id": file.read_text().strip(), "resume": "allow"}

    def table(self, samples: Sequence[Generation]) -> Any:
        return self.module.Table(columns=list(Generation._fields), data=[list(sample) for sample in samples])

    @classmethod
    def folder(cls, run: Run) -> Path | None:
        disabled = os.environ.get("WANDB_MODE", "").lower() == "disabled"
        return None if disabled else Path(os.environ.get("WANDB_DIR", "."), "wandb")

    @classmethod
    def check(cls) -> None:
        if os.environ.get("WANDB_MODE", "").lower() in ("offline", "dryrun", "disabled"):
            return
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return
        import wandb

        # Asked of wandb: the default server has changed between its versions.
        host = urlparse(wandb.Settings().base_url).hostname or ""
        home = Path.home()
        for file in (os.environ.get("NETRC"), home / ".netrc", home / "_netrc"):
            try:
                if file and netrc.netrc(str(file)).authenticators(host):
                    return
            except (OSError, netrc.NetrcParseError):
                continue
        raise ValueError(
            f"trainer.logger: 'wandb' is not logged in to {host}. "
            "Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline."
        )
