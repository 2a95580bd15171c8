"""Requests of clients of the scoring API, validated and converted to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.inference.serving.api_errors import ApiError
from verl.inference.serving.openai_requests import (
    ModelFacts,
    checked_length,
    checked_model,
    template_messages,
    tokenize_prompt,
)
from verl.inference.serving.request_models import Message, ScoreRequest, as_inputs, validate_request
from verl.utils.http_server.json_body import parse_json
from verl.utils.scoring_tokens import ScoringEncoder

__all__ = ["CLASSIFY", "REWARDS", "ScoreAsk", "parse_scoring"]

CLASSIFY, REWARDS = "/classify", "/v1/rewards"


@dataclass(frozen=True)
class ScoreAsk:
    """A checked request: token ids of each input."""

    model: str
    inputs: list[list[int]]


def parse_scoring(path: str, body: bytes, facts: ModelFacts, tokenizer: Any, heavy: bool = True) -> ScoreAsk:
    """The request in a body: `input` is a text, token ids, a conversation, or a list of these; or `messages` is one."""
    given = parse_json(body)
    request = validate_request(ScoreRequest, given)
    model = checked_model(request, facts)
    if (request.input is None) == (request.messages is None):
        raise ApiError(
            "input: should be a text, token ids, a conversation, or a list of these; or set messages.", "input"
        )
    inputs: list[Any] = [request.messages] if request.input is None else request.input
    if not inputs or len(inputs) > facts.max_answers:
        raise ApiError(
            f"input: there are {len(inputs)}; one request may have 1 to {facts.max_answers}. Send several, or start the"
            " server with a larger --max-answers.",
            "input",
        )
    kept = request.truncate_prompt_tokens
    if kept == 0 or (kept is not None and kept > facts.max_model_len):
        name = "truncate_prompt_tokens"
        raise ApiError(f"{name}: should be -1, or 1 to {facts.max_model_len} (got {kept}).", name)
    kept = facts.max_model_len if kept == -1 else kept
    raw = [given["messages"]] if request.input is None else as_inputs(given["input"])
    return ScoreAsk(model, [_tokens(*pair, facts, tokenizer, kept) for pair in zip(raw, inputs, strict=True)])


def _tokens(given: Any, item: Any, facts: ModelFacts, tokenizer: Any, kept: int | None) -> list[int]:
    """Token ids of one input, which may be as long as the model's context."""
    if not (isinstance(item, list) and item and isinstance(item[0], Message)):
        return tokenize_prompt(item, facts, tokenizer, "input", room=0, kept=kept)
    # Cut to one token too many, a conversation is rejected below, unless the client wants it cut.
    tokens = ScoringEncoder(tokenizer, kept or facts.max_model_len + 1)
    try:
        return checked_length(tokens.encode([template_messages(given, item)])[0], facts, "input", room=0)
    except ValueError as error:
        raise ApiError(f"input: {error}.", "input") from error
