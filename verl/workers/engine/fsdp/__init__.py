"""The engine on torch's `fully_shard`."""

from verl.workers.engine.fsdp.engine import FSDPEngine

__all__ = ["FSDPEngine"]
