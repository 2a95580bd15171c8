"""Gateway: agents that only speak the OpenAI or the Anthropic API, recorded token for token."""
