"""The weights of a sharded model on their way out: by Hugging Face name, whole, with adapters added in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.models.lora import Adapters
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups
from verl.workers.engine.common.safetensors_files import write_safetensors
from verl.workers.engine.fsdp import sharding


class ModelWeights:
    """Of the model `hf`, which has `adapters` or not. Names are those of the model without adapters."""

    def __init__(self, hf: Any, adapters: Adapters | None, device: torch.device) -> None:
        self._hf = hf
        self._adapters = adapters
        self._device = device

    def named(self) -> dict[str, torch.Tensor]:
        """Every weight as it is sharded now, adapters left out; tied ones under each of their names."""
        state = self._hf.state_dict()
        return state if self._adapters is None else self._adapters.plain(state)

    def unique(self) -> dict[str, torch.Tensor]:
        """The same, with tied ones under their first name only."""
        named = (name for name, _ in self._hf.named_parameters(remove_duplicate=False))
        tied = set(named) - {name for name, _ in self._hf.named_parameters()}
        return {name: value for name, value in self.named().items() if name not in tied}

    def stored(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold to continue, under the names it has here: what learns."""
        return self.unique() if self._adapters is None else self._adapters.trained(self._hf.state_dict())

    def bucket(self) -> Callable[[dict[str, torch.dtype]], dict[str, torch.Tensor]]:
        """Gives the whole weights of the names it is called with, in their dtypes; a collective, and as a rule one."""
        named = self.named()

        def gathered(dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
            adapted = {name for name in dtypes if self._adapters is not None and self._adapters.has(name)}
            plain = {name: (named[name], dtype) for name, dtype in dtypes.items() if name not in adapted}
            found = sharding.whole_tensors(plain, self._device)
            return {
                name: self.whole(name, named[name], dtype) if name in adapted else found[name]
                for name, dtype in dtypes.items()
            }

        return gathered

    def whole(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight `name`, of which `value` is the shard, with its adapter, on the engine's device; a collective."""
        if self._adapters is None or not self._adapters.has(name):
            return sharding.whole_tensor(value, dtype, self._device)
        base = sharding.whole_tensor(value, value.dtype, self._device)
        return self._adapters.merged(name, base, self._gathered).to(dtype)

    def write_adapter(self, folder: Path, source: str) -> None:
        """The adapters alone (and a value head) as peft loads them onto the model `source`; a collective.

        Nothing is written for a model without adapters.
        """
        if self._adapters is None:
            return
        names = self._adapters.trained(self._hf.state_dict())
        state = {self._adapters.peft_name(name): self._gathered(value) for name, value in names.items()}
        with groups.failing_together():
            if dist.get_rank() == 0:
                with ChecksumRecorder(folder) as recorder, recorder.open("adapter_model.safetensors") as stream:
                    write_safetensors(state, stream)
                self._adapters.peft_config(source).save_pretrained(str(folder))

    def _gathered(self, value: torch.Tensor) -> torch.Tensor:
        return sharding.whole_tensor(value, value.dtype, self._device)
