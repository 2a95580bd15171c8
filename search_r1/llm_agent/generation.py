"""Alias of verl.agent.search_r1_manager: search turns for a batch (`do_search=True` runs rows independently)."""

from verl.agent.search_r1_manager import GenerationConfig, LLMGenerationManager

__all__ = ["GenerationConfig", "LLMGenerationManager"]
