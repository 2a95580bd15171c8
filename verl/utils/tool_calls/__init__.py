"""Tool calls in what a model writes: one parser per family of models (`multi_turn.format`)."""

from verl.config.names import TOOL_FORMAT_SYNONYMS, TOOL_FORMATS
from verl.utils.registry import Registry
from verl.utils.tool_calls.call import Parser, ToolCall

__all__ = ["Parser", "ToolCall", "get_parser"]

_PARSERS: Registry[type[Parser]] = Registry("actor_rollout_ref.rollout.multi_turn.format", TOOL_FORMATS)


def get_parser(format: str) -> Parser:
    """The parser of that name; a ValueError says which there are."""
    return _PARSERS.lookup(TOOL_FORMAT_SYNONYMS.get(format, format))()
