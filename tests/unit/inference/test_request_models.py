"""Request models: generated values for every field are accepted and usable, or rejected with the field's name."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.tiny import tiny_tokenizer
from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import CHAT, COMPLETIONS, ModelInfo, parse
from verl.inference.serving.request_models import ChatRequest, CompletionRequest, ScoreRequest
from verl.inference.serving.scoring_requests import REWARDS, parse_scoring
from verl.utils.http_server.app import HttpError

CONTEXT = 64
MODEL_INFO = ModelInfo(
    ("tiny",), CONTEXT, 264, frozenset({1}), max_responses=8, client_templates=False, longest_token=20
)
TOKENIZER = tiny_tokenizer()
MESSAGES = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": MESSAGES},
    REWARDS: {"input": "hi"},
}
MODELS = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest, REWARDS: ScoreRequest}
FIELDS = [(path, name) for path, model in MODELS.items() for name in model.model_fields]
# Fields without effect: every value is accepted.
IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
ANY_OBJECT = {"chat_template_kwargs"}
NUMBERS = [0, -1, 1, 2, 17, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
NUMBERS += [0.0, -0.0, 0.5, 1.5, 1e-5, 1e-40, 5e-324, 1e30, 1e308, -1e308, 2.0]
TEXTS = ["", "x", "1", "true", "none", "auto", "required", "tiny", "x" * 600, "é\u2028\x00", "{{ 1/0 }}", "hi " * 999]
KEYS = ["type", "function", "name", "role", "content", "text", "schema", "json_schema", "arguments", "tool_calls"]
KEYS += ["strict", "parameters", "include_usage", "0", "263", "264", "007", "-1", "x", "tokenize", "chat_template"]


def send(path: str, fields: dict[str, Any] | bytes) -> Any:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return (parse_scoring if path == REWARDS else parse)(path, body, MODEL_INFO, TOKENIZER)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 4 else 4)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind <= 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice([*TEXTS, "function", "json_schema", "json_object", "user", "object", "string"])
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice([MESSAGES, {"type": "function", "function": {"name": "f", "strict": True}}, {"7": 1}])


def rejection(path: str, fields: dict[str, Any]) -> ApiError | None:
    """The error of a request. None: it was accepted and can be submitted."""
    try:
        request = send(path, fields)
    except ApiError as error:
        return error
    if path == REWARDS:
        assert 1 <= min(map(len, request.inputs)) <= max(map(len, request.inputs)) <= CONTEXT
        return None
    for made in request.requests(CONTEXT):
        assert 1 <= made.params.max_new_tokens <= CONTEXT - len(made.prompt_ids)
    return None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("path", MODELS)
def test_generated_values_are_accepted_or_rejected_with_their_field(path, seed):
    rng = random.Random(f"{path} {seed}")
    names = list(MODELS[path].model_fields)
    for _ in range(1000):
        count = rng.choice([1, 1, 1, 2, 4])
        fields = {**VALID[path], **{name: value(rng) for name in rng.sample(names, count)}}
        error = rejection(path, fields)
        if error is not None:
            assert 400 <= error.status < 500, fields
            assert str(error.param).partition("[")[0] in names, fields
            assert len(json.dumps(error.content).encode()) < 4000


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_a_value_of_the_wrong_type_is_rejected_with_its_field(path, name):
    if name in IGNORED:
        send(path, {**VALID[path], name: [[{"a": 1}]]})
        return
    wrong = [[[{"a": 1}]]] if name not in ANY_OBJECT else [[1], "x", 5]
    if MODELS[path].model_fields[name].annotation is not bool:
        wrong += [True]
    for wrong_value in wrong:
        with pytest.raises(ApiError) as caught:
            send(path, {**VALID[path], name: wrong_value})
        assert caught.value.status == 400
        assert caught.value.param.partition("[")[0] == name


@pytest.mark.parametrize(
    "number",
    [b"9" * 400, b"-" + b"9" * 400, b"-9223372036854775809", b"1e999", b"-1e999", b"NaN", b"Infinity"],
)
@pytest.mark.parametrize("path", MODELS)
def test_numbers_that_do_not_fit_are_rejected_in_every_field(path, number):
    for name in MODELS[path].model_fields:
        for shown in (number, b"[" + number + b"]", b'{"x": ' + number + b"}"):
            with pytest.raises(HttpError) as caught:
                send(path, b'{"%s": %s}' % (name.encode(), shown))
            assert caught.value.status == 400


@pytest.mark.parametrize("path", MODELS)
def test_null_means_absent(path):
    nulls = dict.fromkeys(MODELS[path].model_fields)
    send(path, {**nulls, **VALID[path]})


STRICT = {"function": {"name": "f", "strict": True}}
NESTED = {"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 60, "min_tokens": 5}, "min_tokens"),  # beyond the room that the prompt leaves
        (CHAT, {"tools": [STRICT], "tool_choice": "required", "ignore_eos": True}, "tools"),
        (CHAT, {"messages": [NESTED]}, "messages[0]"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "n"),
        (COMPLETIONS, {"temprature": 1}, "temprature"),
        (REWARDS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (REWARDS, {"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
    ],
)
def test_rejections_that_depend_on_several_fields_name_one_of_them(path, fields, param):
    with pytest.raises(ApiError) as caught:
        send(path, {**VALID[path], **fields})
    assert (caught.value.status, caught.value.param) == (400, param)
