"""What a client of the scoring API asks, checked and turned into token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.inference.serving.fields import ApiError, Fields, read_json
from verl.inference.serving.openai_requests import ModelFacts, asked_model, checked_length, read_messages, read_prompt
from verl.utils.conversation_tokens import ConversationTokens

__all__ = ["CLASSIFY", "REWARDS", "ScoreAsk", "parse_scoring"]

CLASSIFY, REWARDS = "/classify", "/v1/rewards"
_WANTED = "must be a text, token ids, a conversation, or a list of these"


@dataclass(frozen=True)
class ScoreAsk:
    """A checked request: token ids of each input."""

    model: str
    inputs: list[list[int]]


def parse_scoring(path: str, body: bytes, facts: ModelFacts, tokenizer: Any, heavy: bool = True) -> ScoreAsk:
    """The request in a body: `input` is a text, token ids, a conversation, or a list of these; or `messages` is one."""
    fields = Fields(read_json(body), ("input", "messages", "truncate_prompt_tokens"), common=("model",))
    model = asked_model(fields, facts)
    if ("input" in fields.given) == ("messages" in fields.given):
        raise ApiError(f"input: {_WANTED}; or give messages instead.", "input")
    given = fields.given
    items = _items(given["input"]) if "input" in given else [read_messages(given["messages"])]
    if not items or len(items) > facts.max_answers:
        raise ApiError(
            f"input: there are {len(items)}; one request may have 1 to {facts.max_answers}. Send several, or start the"
            " server with a larger --max-answers.",
            "input",
        )
    most = fields.integer("truncate_prompt_tokens", None, low=-1, high=facts.max_model_len)
    if most == 0:
        fields.refuse("truncate_prompt_tokens", "leaves nothing")
    kept = facts.max_model_len if most == -1 else most
    return ScoreAsk(model, [_tokens(item, facts, tokenizer, kept) for item in items])


def _items(given: Any) -> list[Any]:
    """A list of inputs; a text, a list of numbers or of messages is one."""
    single = isinstance(given, str) or (isinstance(given, list) and given and not isinstance(given[0], str | list))
    if not single and not isinstance(given, list):
        raise ApiError(f"input: {_WANTED}.", "input")
    return [given] if single else given


def _tokens(item: Any, facts: ModelFacts, tokenizer: Any, kept: int | None) -> list[int]:
    """All of a sequence is read: it may be as long as the model reads."""
    if not (isinstance(item, list) and item and isinstance(item[0], dict)):
        return read_prompt(item, facts, tokenizer, "input", room=0, kept=kept)
    # Cut to one token too many, a conversation is refused below, unless the client wants it cut.
    tokens = ConversationTokens(tokenizer, kept or facts.max_model_len + 1)
    try:
        return checked_length(tokens.encode([read_messages(item)])[0], facts, "input", room=0)
    except ValueError as error:
        raise ApiError(f"input: {error}.", "input") from error
