"""SandboxFusion, code run over HTTP: what is said on the wire, and the client. The server is `verl.sandbox.server`."""

from verl.utils.sandbox_fusion.client import SandboxClient, SandboxUnavailable

__all__ = ["SandboxClient", "SandboxUnavailable"]
