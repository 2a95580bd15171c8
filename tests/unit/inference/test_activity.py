"""Console lines of a model server: the example works in a shell, and a line appears only if requests came."""

import asyncio
import json
import logging
import shlex

from verl.inference.serving import api
from verl.inference.serving.api import ActivityLog, activity_line, example_request

URL = "http://127.0.0.1:8001/v1"


def test_the_example_is_a_shell_command_for_the_kind_of_model():
    words = shlex.split(example_request("it's a model", True, False, URL))
    assert words[:3] == ["curl", "-s", f"{URL}/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's a model"
    assert json.loads(words[-1])["messages"][0]["role"] == "user"
    assert "prompt" in json.loads(shlex.split(example_request("m", False, False, URL))[-1])
    assert "input" in json.loads(shlex.split(example_request("m", None, False, URL))[-1])
    assert '-H "Authorization: Bearer $VERL_API_KEY"' in example_request("m", True, True, URL)


def test_requests_and_tokens_per_second():
    assert activity_line(12, 340, 3, 10.0) == "12 requests in 10 s (1.2/s), 34 tokens/s, 3 unfinished"
    assert activity_line(1, 0, 0, 10.0) == "1 requests in 10 s (0.1/s), 0 unfinished"


def test_only_post_requests_are_counted_and_only_activity_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(api, "ACTIVITY_INTERVAL_S", 0.001)
    caplog.set_level(logging.INFO, logger="verl")

    async def app(scope, receive, send):
        pass

    async def request(method):
        await log({"type": "http", "method": method}, None, None)

    log = ActivityLog(app, tokens=lambda: 0, unfinished=lambda: 2)
    asyncio.run(request("GET"))
    assert log.requests == 0
    with log:
        asyncio.run(request("POST"))
        while not caplog.messages:
            pass
    assert log.requests == 1
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("2 unfinished")
