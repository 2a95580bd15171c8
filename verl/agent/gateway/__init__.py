"""Gateway: agents that only speak the OpenAI or the Anthropic API, recorded token for token."""

from verl.agent.gateway.agent import GatewayAgentLoop

__all__ = ["GatewayAgentLoop"]
