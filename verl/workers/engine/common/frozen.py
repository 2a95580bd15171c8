"""What a checkpoint holds of an engine at one moment, and the parts of it that are alike for all engines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl.config.names import CHECKPOINT_CONTENTS
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.utils.torch_archive import load_archive
from verl.workers.engine.common import checkpoint
from verl.workers.engine.common.export import HFExport
from verl.workers.engine.common.optim import LossScale
from verl.workers.engine.common.same_model import ABOUT


def checked(path: str | os.PathLike, contents: Collection[str]) -> Path:
    """The folder of a checkpoint; ValueError for contents that there are not."""
    unknown = sorted(set(contents) - set(CHECKPOINT_CONTENTS))
    if unknown:
        raise ValueError(f"checkpoint contents: {unknown} are unknown. Use some of {', '.join(CHECKPOINT_CONTENTS)}.")
    return Path(path)


@dataclass(frozen=True)
class Frozen:
    """What a checkpoint of some contents holds of an engine at one moment: live tensors, or copies of them."""

    contents: Collection[str]
    weights: Mapping[str, torch.Tensor]
    """Under names that the engine's state gives them."""
    moments: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    about: Mapping[str, Any]

    def with_tensors(self, change: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> Frozen:
        """With others in place of all tensors, which `change` gives by name."""
        names = {f"weights/{name}": value for name, value in self.weights.items()}
        names |= {f"moments/{name}": value for name, value in self.moments.items()}
        found = change(names)
        return replace(
            self,
            weights={name: found[f"weights/{name}"] for name in self.weights},
            moments={name: found[f"moments/{name}"] for name in self.moments},
        )

    def write_alone(self, recorder: ChecksumRecorder) -> None:
        """The files of a checkpoint that are one rank's: what the model is, the schedule and the random states."""
        if "model" in self.contents:
            with recorder.open(ABOUT) as stream:
                stream.write(json.dumps(self.about, indent=1).encode())
        if "extra" in self.contents:
            with recorder.open(_EXTRA) as stream:
                torch.save(dict(self.extra), stream)


class SavedState(Protocol):
    """What an engine has that changes as it learns."""

    def sizes(self, contents: Collection[str]) -> list[int]:
        """Bytes that this rank holds of each tensor of such a checkpoint, with all moments. No collective."""

    def write(self, frozen: Frozen, folder: Path, export: HFExport | None, group: dist.ProcessGroup | None) -> None:
        """All files of a checkpoint; a collective of `group`. Reads nothing of the engine that changes."""


_EXTRA = "extra.pt"


def extra_state(schedule_step: int, loss_scale: LossScale, device: torch.device) -> dict[str, Any]:
    """Schedule, loss scale and the random states of all ranks; a collective."""
    random = checkpoint.random_states(device)
    return {"schedule_step": schedule_step, "loss_scale": loss_scale.state_dict(), "random": random}


def restore_extra(folder: Path, loss_scale: LossScale, device: torch.device) -> int:
    """The same from a checkpoint; gives the schedule's step."""
    extra = load_archive(folder / _EXTRA)
    loss_scale.load_state_dict(extra["loss_scale"])
    checkpoint.restore_random_state(extra["random"], device)
    return extra["schedule_step"]
