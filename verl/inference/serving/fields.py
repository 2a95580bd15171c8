"""The fields of an OpenAI request, read one by one; every mistake has its own message."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from verl.inference.serving.api_errors import ApiError

__all__ = ["MAX_STOP_CHARACTERS", "ApiError", "Fields", "HeavyRequest", "read_json"]

# Fields of the API that this server does not do, with the values that ask for nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
# Fields that change nothing in an answer.
_WITHOUT_EFFECT = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_COMMON = (
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "seed",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
)
# Every sampled token is compared with each stop string, over as many tokens as the string has bytes.
MAX_STOP_CHARACTERS = 512


class HeavyRequest(Exception):
    """A request brings a program (a chat template, a grammar) and was read without leave to run one."""


class Fields:
    """The fields of one request; null is the same as not given. `own` are those of its kind alone, beside `common`."""

    def __init__(self, given: Mapping[str, Any], own: Sequence[str], common: Sequence[str] = _COMMON) -> None:
        self.given = {name: value for name, value in given.items() if value is not None}
        known = {*common, *own, *_NOT_DONE, *_WITHOUT_EFFECT}
        for name, value in self.given.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ApiError(f"Unrecognized request argument supplied: {name[:200]}.{hint}", name[:200])
            if name in _NOT_DONE and value not in _NOT_DONE[name]:
                self.refuse(name, "is not done by this server. Leave it out")

    def refuse(self, name: str, why: str) -> NoReturn:
        shown = json.dumps(self.given.get(name), ensure_ascii=False)
        raise ApiError(f"{name}: {shown if len(shown) < 200 else shown[:200] + '…'} {why}.", name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.given.get(name, default)
        return value if isinstance(value, bool) else self.refuse(name, "must be true or false")

    def integer(self, name: str, default: Any, low: int, high: int = 2**63 - 1) -> Any:
        value = self.given.get(name, default)
        if value is not default and not (_is_whole(value) and low <= value <= high):
            limits = f"from {low} to {high}" if high < 2**63 - 1 else f"of at least {low}"
            self.refuse(name, f"must be a whole number {limits}")
        return value

    def number(self, name: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
        value = self.given.get(name, default)
        if not _is_number(value):
            self.refuse(name, "must be a number")
        if not low <= value <= high:
            self.refuse(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        value = self.given.get(name, [])
        if not isinstance(value, list) or not all(_is_whole(token) and 0 <= token < vocab_size for token in value):
            self.refuse(name, f"must be a list of token ids from 0 to {vocab_size - 1}")
        return value

    def biases(self, name: str, vocab_size: int) -> tuple[tuple[int, float], ...]:
        """{token id as a text: bias}."""
        value = self.given.get(name, {})
        ids = [int(key) for key in value if key.isdecimal() and len(key) < 10] if isinstance(value, dict) else []
        if not isinstance(value, dict) or len(ids) < len(value) or any(token >= vocab_size for token in ids):
            self.refuse(name, f"must be an object whose keys are token ids from 0 to {vocab_size - 1}")
        if len(set(ids)) < len(ids):
            self.refuse(name, "must name each token id once")
        if not all(_is_number(bias) and -100 <= bias <= 100 for bias in value.values()):
            self.refuse(name, "must have values from -100 to 100")
        return tuple(zip(ids, map(float, value.values()), strict=True))

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        value = self.given.get(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most or not all(isinstance(t, str) and t for t in texts):
            self.refuse(name, f"must be a text, or up to {most} of them, none of them empty")
        if any(len(text) > MAX_STOP_CHARACTERS for text in texts):
            self.refuse(name, f"must have texts of at most {MAX_STOP_CHARACTERS} characters")
        return tuple(dict.fromkeys(texts))

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.given.get(name, {})
        return value if isinstance(value, dict) else self.refuse(name, "must be an object")


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds; text in it can be written as UTF-8."""
    try:
        fields = json.loads(body, parse_constant=_no_number)
        json.dumps(fields, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ApiError("the body is not valid JSON for this server: it is nested too deeply.") from error
    except UnicodeEncodeError as error:
        raise ApiError("the body has half a character (a lone surrogate such as \\ud800) in a text.") from error
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object.")
    return fields


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return math.isfinite(value) if isinstance(value, float) else _is_whole(value) and abs(value) < 2**63


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
