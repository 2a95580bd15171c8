"""A language model as judge: it rates each response to a prompt template, and the score is parsed from its output."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.reward_score.served import post, required_prompt

_FILE_SUFFIXES = (".txt", ".md", ".jinja", ".j2")
_SHOWN_CHARACTERS = 300
_MAX_REASON_CHARACTERS = 400


@dataclass(frozen=True)
class Judge:
    """Prompt and parser of a judge: the fields of `reward_model.judge`, with the text of the template."""

    template: str
    system: str | None
    parser: str
    field: str
    json_schema: dict[str, Any]
    constrain: bool
    pattern: str
    low: float
    high: float
    n: int
    max_tokens: int
    temperature: float
    model: str | None

    def request(self, **variables: Any) -> dict[str, Any]:
        """The body of the chat completion request. `variables`: the values of the template's variables."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": compiled(self.template).render(**variables)}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.n > 1:
            body["n"] = self.n
        if self.model is not None:
            body["model"] = self.model
        if self.parser == "json" and self.constrain:
            schema = {"name": "judgement", "schema": self.json_schema or self._default_schema()}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _default_schema(self) -> dict[str, Any]:
        reason = {"type": "string", "maxLength": _MAX_REASON_CHARACTERS}
        number = {"type": "number", "minimum": self.low, "maximum": self.high}
        properties = {"reason": reason, self.field: number}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def read(self, judgement: str) -> float:
        """Parse the score of a judgement, scaled to 0…1. ValueError: there is none."""
        is_json = self.parser == "json"
        value = _score_in_json(judgement, self.field) if is_json else _score_in_text(judgement, self.pattern)
        if value is None:
            expected = f"a JSON object with {self.field!r}" if is_json else f"a match of {self.pattern!r}"
            shown = judgement[-_SHOWN_CHARACTERS:]
            raise ValueError(f"the judge's output contains no score (expected {expected}): {shown!r}")
        if not self.low <= value <= self.high:
            raise ValueError(f"the judge's score {value:g} is not from {self.low:g} to {self.high:g}")
        return (value - self.low) / (self.high - self.low)


async def compute_score(
    solution_str: str,
    ground_truth: Any,
    data_source: str,
    extra_info: Any,
    raw_prompt: Any,
    reward_router_address: str,
    judge: Judge,
) -> dict[str, Any]:
    """`score`: the mean of the judgements that could be parsed; `judge_unreadable`: the fraction that could not;
    `judgement`: the text of the first one. ValueError: none could be parsed."""
    messages = required_prompt(raw_prompt)
    body = judge.request(
        prompt=str(messages[-1]["content"]),
        messages=messages,
        answer=solution_str,
        ground_truth=ground_truth,
        data_source=data_source,
        extra_info=extra_info,
    )
    reply = await post(reward_router_address, "/v1/chat/completions", body)
    texts = [choice["message"]["content"] or "" for choice in reply["choices"]]
    scores, problems = [], []
    for text in texts:
        try:
            scores.append(judge.read(text))
        except ValueError as error:
            problems.append(error)
        await asyncio.sleep(0)
    if not scores:
        raise problems[0]
    unreadable = len(problems) / len(texts)
    return {"score": sum(scores) / len(scores), "judge_unreadable": unreadable, "judgement": texts[0]}


def template_text(template: str) -> str:
    """The text of a template, read from a file if `template` is a file name."""
    if "\n" in template or not template.endswith(_FILE_SUFFIXES):
        return template
    return Path(template).expanduser().read_text(encoding="utf-8")


@functools.lru_cache
def compiled(template: str) -> Any:
    """Compile a template (jinja2.TemplateSyntaxError if invalid); undefined variables raise when it is rendered."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True).from_string(template)


def _score_in_json(text: str, field: str) -> float | None:
    """The number under `field` in the last JSON object that has one. ValueError: an object is nested too deeply."""
    decoder, score = json.JSONDecoder(parse_int=float), None  # a large integer becomes inf, which is no score
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            start = text.find("{", start + 1)
            continue
        except RecursionError:
            raise ValueError("the judge's output contains a JSON object that is nested too deeply") from None
        number = value.get(field)
        if isinstance(number, float) and math.isfinite(number):
            score = number
        start = text.find("{", end)
    return score


def _score_in_text(text: str, pattern: str) -> float | None:
    matches = re.findall(pattern, text)
    if not matches:
        return None
    last = matches[-1] if isinstance(matches[-1], str) else matches[-1][0]
    try:
        value = float(last)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
