"""`sandbox.*` and `sandbox_fusion.*`: where code that a model wrote runs, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import names
from verl.config.schema import Block, key


@dataclass(kw_only=True, slots=True)
class SandboxConfig(Block):
    require: str = key(
        "Isolation without which no code runs: of files, of the network too, full (namespaces and seccomp), or none.",
        choices=names.SANDBOX_LEVELS,
    )
    warm: int = key("Interpreters that wait ready in each process that runs code.", min=1)
    memory_limit_mb: int = key("Memory of one program.", min=16)
    wall_s: float = key(
        "Seconds for all tests of an answer; less than reward_model.reward_kwargs.timeout (10 with prime).",
        min=3,
    )


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig(Block):
    url: str | None = key(
        "A SandboxFusion server that runs the code of rewards and tools (python -m verl.sandbox.server is one).",
        null="the local sandbox",
    )
    max_concurrent: int = key("Requests under way at once, of each process that has some.", min=1)
    memory_limit_mb: int = key("Memory of one program there.", min=16)
