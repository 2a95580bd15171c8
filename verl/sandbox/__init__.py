"""The sandbox over HTTP: a server around `verl.utils.sandbox`, and the client for it and for any SandboxFusion."""

from verl.utils.sandbox_fusion import SandboxClient, SandboxUnavailable

__all__ = ["SandboxClient", "SandboxUnavailable"]
