"""Requests of clients of the scoring API, validated and converted to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import (
    ModelInfo,
    check_length,
    resolve_model_name,
    template_messages,
    tokenize_prompt,
)
from verl.inference.serving.request_models import Message, ScoreRequest, as_inputs, validate_request
from verl.utils.http_server.json_body import parse_json
from verl.utils.scoring_tokens import ScoringEncoder

__all__ = ["CLASSIFY", "REWARDS", "ParsedScoreRequest", "parse_scoring"]

CLASSIFY, REWARDS = "/classify", "/v1/rewards"


@dataclass(frozen=True)
class ParsedScoreRequest:
    """A validated request: token ids of each input."""

    model: str
    inputs: list[list[int]]


def parse_scoring(
    path: str, body: bytes, model_info: ModelInfo, tokenizer: Any, heavy: bool = True
) -> ParsedScoreRequest:
    """Parse a request with `input` (a text, token ids, a conversation, or a list of these) or `messages`."""
    fields = parse_json(body)
    request = validate_request(ScoreRequest, fields)
    model = resolve_model_name(request, model_info)
    if (request.input is None) == (request.messages is None):
        raise ApiError(
            "input: should be a text, token ids, a conversation, or a list of these; or set messages.", "input"
        )
    inputs: list[Any] = [request.messages] if request.input is None else request.input
    if not inputs or len(inputs) > model_info.max_responses:
        raise ApiError(
            f"input: has {len(inputs)} entries; one request may have 1 to {model_info.max_responses}. Send several, or"
            " start the server with a larger --max-answers.",
            "input",
        )
    keep_last = request.truncate_prompt_tokens
    if keep_last == 0 or (keep_last is not None and keep_last > model_info.max_model_len):
        name = "truncate_prompt_tokens"
        raise ApiError(f"{name}: should be -1, or 1 to {model_info.max_model_len} (got {keep_last}).", name)
    keep_last = model_info.max_model_len if keep_last == -1 else keep_last
    raw = [fields["messages"]] if request.input is None else as_inputs(fields["input"])
    return ParsedScoreRequest(
        model, [_tokenize(*pair, model_info, tokenizer, keep_last) for pair in zip(raw, inputs, strict=True)]
    )


def _tokenize(raw: Any, item: Any, model_info: ModelInfo, tokenizer: Any, keep_last: int | None) -> list[int]:
    """Token ids of one input, which may be as long as the model's context."""
    if not (isinstance(item, list) and item and isinstance(item[0], Message)):
        return tokenize_prompt(item, model_info, tokenizer, "input", room=0, keep_last=keep_last)
    # Without truncate_prompt_tokens, one token more than fits is kept, so that `check_length` rejects a long input.
    encoder = ScoringEncoder(tokenizer, keep_last or model_info.max_model_len + 1)
    try:
        return check_length(encoder.encode([template_messages(raw, item)])[0], model_info, "input", room=0)
    except ValueError as error:
        raise ApiError(f"input: {error}.", "input") from error
