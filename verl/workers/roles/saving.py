"""SavingWorker: what every role that learns has in common: its engine's state is written and read back."""

from __future__ import annotations

from verl.config.engine import CheckpointConfig
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine.base import TrainEngine

__all__ = ["SavingWorker"]


class SavingWorker(Worker):
    """A rank whose `engine` learns."""

    engine: TrainEngine

    @property
    def checkpoint(self) -> CheckpointConfig:
        """Which contents are saved and loaded."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, path: str) -> None:
        """Sharded state under `path`; a folder that transformers loads under `path/huggingface`.

        With LoRA: what learns, `path/lora_adapter` as peft loads it, and the merged model under `path/huggingface`.
        """
        self.begin_save(path)
        self.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, path: str) -> None:
        """Freeze the state as it is now; it is written while other calls go on."""
        self.engine.begin_save(path, self.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, lane="control")
    def finish_save(self) -> None:
        """Wait until what was begun is written."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Read back what `save_checkpoint` wrote."""
        with self.engine.awake():
            self.engine.load(path, self.checkpoint.load_contents)
