"""Settings of a process that runs model-written code: in the local sandbox, or on a SandboxFusion server."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl.sandbox.sandbox import Sandbox, available
from verl.sandbox.types import IsolationMissing, Limits, Result

if TYPE_CHECKING:  # slow imports, which scorers of other tasks do not need
    from verl.config.trainer import SandboxConfig, SandboxFusionConfig
    from verl.sandbox.client import SandboxClient


class CodeRunner(Protocol):
    """The interface of `Sandbox` and `SandboxClient`."""

    def run(
        self,
        code: str,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        fetch: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Result: ...


@dataclass(frozen=True)
class CodeSettings:
    """The settings of `sandbox.*` and `sandbox_fusion.*` that a process needs to run code."""

    require: str = "files"
    warm: int = 1
    memory_mb: int = 1024
    wall_s: float = 8.0
    url: str | None = None
    max_concurrent: int = 64

    @classmethod
    def from_config(cls, sandbox: SandboxConfig, fusion: SandboxFusionConfig) -> CodeSettings:
        memory = fusion.memory_limit_mb if fusion.url else sandbox.memory_limit_mb
        return cls(sandbox.require, sandbox.warm, memory, sandbox.wall_s, fusion.url, fusion.max_concurrent)

    @property
    def limits(self) -> Limits:
        return Limits(wall_s=self.wall_s, memory_mb=self.memory_mb)

    def runner(self, modules: Mapping[str, str] | None = None) -> CodeRunner:
        """The runner of this process, started on first use; it ends with the process.

        `modules`: name and source code of modules that are already imported in programs of a local sandbox.
        """
        return _client(self.url, self.max_concurrent) if self.url else self.sandbox(modules)

    def sandbox(self, modules: Mapping[str, str] | None = None) -> Sandbox:
        """The local sandbox of this process."""
        return _sandbox(self.require, self.warm, tuple((modules or {}).items()), os.getpid())

    def check(self) -> str:
        """Describe where code runs and how it is isolated; ValueError, with the reason, if it cannot run."""
        if self.url:
            problem = _client(self.url, self.max_concurrent).problem()
            if problem is not None:
                raise ValueError(problem)
            return f"the sandbox at {self.url}"
        isolation = available()
        try:
            isolation.check(self.require)
        except IsolationMissing as error:
            raise ValueError(str(error)) from error
        return f"the local sandbox: {isolation}"


@functools.lru_cache
def _client(url: str, max_concurrent: int) -> SandboxClient:
    from verl.sandbox.client import SandboxClient

    return SandboxClient(url, max_concurrent=max_concurrent)


@functools.lru_cache
def _sandbox(require: str, warm: int, modules: tuple[tuple[str, str], ...], _pid: int) -> Sandbox:
    """`_pid`: part of the cache key, so that a forked process starts its own sandbox."""
    return Sandbox(require=require, warm=warm, modules=dict(modules))


_settings = CodeSettings()


def configure(settings: CodeSettings) -> None:
    """Set the default settings for the tools of this process."""
    global _settings
    _settings = settings


def configured() -> CodeSettings:
    """The settings of the last `configure`, else the defaults."""
    return _settings
