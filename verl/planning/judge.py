"""What the run's own judge takes: a reward model that answers requests, a whole copy on every rank of its pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl.config.layout import judge_shares_devices, serves_reward_model
from verl.config.ppo import PPOConfig
from verl.planning.costs import TrainedModel
from verl.planning.engines import BYTES, EngineParts, engine_parts
from verl.planning.phases import DeviceMemory
from verl.planning.shapes import ModelShape


@dataclass(frozen=True)
class Judge:
    """One that writes its judgements, or (`generates` is False) a classifier, which keeps no KV."""

    config: PPOConfig
    shape: ModelShape
    generates: bool

    @classmethod
    def of(cls, config: PPOConfig, shapes: Mapping[str, ModelShape]) -> Judge | None:
        """None where the run has none, or its shape is not known; `shapes` as of `memory_plan`."""
        shape = shapes.get("judge", shapes.get("reward_model"))
        return cls(config, shape, "judge" in shapes) if shape is not None and serves_reward_model(config) else None

    def bytes(self, phase: str, device: DeviceMemory | None) -> float:
        """On one device while `phase` runs: all of it, or what is left there where it is parked."""
        parts, on_gpu = self._parts(device), self.config.trainer.device == "cuda"
        if phase == "judge" or not self.parks:
            return parts.total
        return parts.graphs if on_gpu else parts.weights  # a CPU's weights are in host memory already

    @property
    def parks(self) -> bool:
        return judge_shares_devices(self.config)

    def model(self) -> TrainedModel:
        """Its weights, as a host counts those that wait there."""
        size = BYTES[self._dtype]
        return TrainedModel(self.shape, compute_bytes=size, frozen=True, device=self.config.trainer.device)

    def _parts(self, device: DeviceMemory | None) -> EngineParts:
        asked = self.config.reward_model.rollout
        length = asked.max_model_len or self.shape.positions
        if length is None:  # its server asks for the same, once it has started
            raise ValueError("reward_model.rollout.max_model_len: the model names no limit of its own. Set it.")
        from verl.inference.serving.model import engine_config  # imports the web server

        engine = engine_config(asked, length)
        engine.dtype = self._dtype
        parts = engine_parts(engine, self.shape, asked.max_num_seqs, self.config.trainer.device == "cuda", device)
        return parts if self.generates else EngineParts(parts.weights, 0.0, 0.0, parts.step)

    @property
    def _dtype(self) -> str:
        asked = self.config.reward_model.rollout.dtype
        return asked if asked != "auto" else "bfloat16" if self.config.trainer.device == "cuda" else "float32"
