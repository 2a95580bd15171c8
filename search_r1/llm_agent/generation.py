"""Search turns for a whole batch; `do_search=True` runs every row at its own pace."""

from verl.agent.search_r1_manager import GenerationConfig, LLMGenerationManager

__all__ = ["GenerationConfig", "LLMGenerationManager"]
