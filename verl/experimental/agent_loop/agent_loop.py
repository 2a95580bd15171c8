"""Alias of names in `verl.agent.loop`."""

from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, TokenOutput, register

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "TokenOutput", "register"]
