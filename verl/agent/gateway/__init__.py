"""Gateway: runs agents that use the OpenAI or the Anthropic API and records their tokens."""

from verl.agent.gateway.agent import GatewayAgentLoop

__all__ = ["GatewayAgentLoop"]
