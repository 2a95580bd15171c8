"""Sessions are accessible with their secret only, and limited in number and size."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import traceback
import urllib.error
import urllib.request

import anthropic
import openai
import pytest

from tests.support.gateway_server import running_gateway
from verl.agent.gateway.agent import WorkerGateway, describe_failure
from verl.agent.gateway.session import GatewaySession, Sessions
from verl.inference.serving.api import ApiError

ASK = {"messages": [{"role": "user", "content": "How warm is it?"}]}
CHAT = "/v1/chat/completions"
SECRET = "v4Zq-secret-of-alice"


def call(url, method="GET", body=None, key=None, raw=None):
    """(status, JSON) of a response."""
    headers = {"Content-Type": "application/json", **({} if key is None else {"Authorization": f"Bearer {key}"})}
    content = raw if raw is not None else None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, content, headers, method=method)) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def requests_of_a_session(url, key=None):
    """The (status, JSON) of every request that needs an existing session."""
    return [
        call(url, key=key),
        call(f"{url}/reward_info", "POST", {"reward_info": {"reward": 0.0}}, key=key),
        call(url, "DELETE", key=key),
    ]


@pytest.mark.parametrize("suffix", ["~wrong", f"~{SECRET[:-1]}", f"~{SECRET}x", f"~~{SECRET}", "~secret-of-bob"])
def test_another_secret_gives_no_access(suffix):
    with running_gateway(lambda _: "Warm.") as gateway:
        alice, bob = f"{gateway.address}/sessions/alice~{SECRET}", gateway.base_url("bob")
        for url in (alice, bob):
            assert call(url + CHAT, "POST", ASK)[0] == 200
        refused = requests_of_a_session(f"{gateway.address}/sessions/alice{suffix}")
        assert [status for status, _ in refused] == [404, 404, 404]
        unknown = requests_of_a_session(f"{gateway.address}/sessions/nobody{suffix}")
        assert refused == unknown, "the response does not tell whether the name exists"
        # A request that generates begins a session of its own.
        assert call(f"{gateway.address}/sessions/alice{suffix}{CHAT}", "POST", ASK)[0] == 200
        status, state = call(alice)
        assert (status, len(state["nodes"]), state["reward_info"], state["status"]) == (200, 1, None, "open")


def test_requests_without_a_secret_are_rejected():
    with running_gateway(lambda _: "Warm.") as gateway:
        url = f"{gateway.address}/sessions/alice"
        assert [status for status, _ in requests_of_a_session(url)] == [401, 401, 401]
        assert call(url + CHAT, "POST", ASK)[0] == 401
        status, content = call(f"{url}/v1/messages", "POST", {**ASK, "max_tokens": 5})
        assert (status, content["error"]["type"]) == (401, "authentication_error")
        assert len(gateway.sessions) == 0


def test_only_requests_that_generate_create_a_session():
    with running_gateway(lambda _: "Warm.", max_model_len=60) as gateway:
        url = gateway.base_url("alice")
        assert [status for status, _ in requests_of_a_session(url)] == [404, 404, 404]
        assert call(f"{url}/v1/models")[0] == 200
        assert call(url + CHAT, "POST", {"messages": []})[0] == 400
        assert call(url + CHAT, "POST", raw=b"{")[0] == 400
        assert len(gateway.sessions) == 0
        assert call(url + CHAT, "POST", ASK)[0] == 200
        assert len(gateway.sessions) == 1


async def test_a_new_session_without_a_valid_request_is_removed_after_its_last_one():
    sessions = Sessions(lambda name: GatewaySession(name, None), 2)
    first_ended = asyncio.Event()

    async def later_request():
        with sessions.use("alice", SECRET):
            await first_ended.wait()

    with sessions.use("alice", SECRET):
        later = asyncio.create_task(later_request())
        await asyncio.sleep(0)
    first_ended.set()
    await later
    assert len(sessions) == 0


def test_sessions_cannot_be_enumerated():
    with running_gateway(lambda _: "Warm.") as gateway:
        assert call(f"{gateway.address}/sessions/alice~{SECRET}{CHAT}", "POST", ASK)[0] == 200
        for path in ("", "/", "/health", "/sessions", "/sessions/", "/sessions/~", "/v1/models", "/sessions/*~x"):
            status, content = call(gateway.address + path)
            assert status == 200 or 400 <= status < 500
            assert "alice" not in json.dumps(content)
            assert SECRET not in json.dumps(content)


def test_the_secret_is_neither_returned_nor_logged(caplog):
    with caplog.at_level(logging.DEBUG), running_gateway(["Warm."].__getitem__) as gateway:
        url = f"{gateway.address}/sessions/alice~{SECRET}"
        contents = [call(url + CHAT, "POST", ASK), call(url)]
        contents += [call(f"{url}/nothing"), call(url + CHAT, "PUT", ASK), call(url + CHAT, "POST", {"messages": 1})]
        failed = call(url + CHAT, "POST", {"messages": [*ASK["messages"], *ASK["messages"]]})  # IndexError
        assert (failed[0], failed[1]["error"]["type"]) == (500, "server_error")
        assert contents[1][1]["id"] == "alice"
    assert "POST /sessions/alice/v1/chat/completions failed" in caplog.text
    assert SECRET not in json.dumps([*contents, failed])
    assert SECRET not in caplog.text


def test_the_api_key_of_unmodified_clients_is_the_secret_of_their_session():
    with running_gateway(lambda number: f"Answer {number}.") as gateway:
        url, ask = f"{gateway.address}/sessions/game", {"model": "m", **ASK}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="alice", max_retries=0) as client:
            reply = client.chat.completions.create(**ask).choices[0].message
        with openai.OpenAI(base_url=f"{url}/v1", api_key="bob", max_retries=0) as client:
            client.chat.completions.create(**ask)
        more = [*ASK["messages"], {"role": "assistant", "content": reply.content}, {"role": "user", "content": "Why?"}]
        with anthropic.Anthropic(base_url=url, api_key="alice", max_retries=0) as client:
            client.messages.create(model="m", max_tokens=20, messages=more)
        assert call(url, key="alice")[1]["requests"]["extension"] == 1
        assert call(url, "DELETE", key="bob")[1]["requests"]["start"] == 1
        assert call(url, key="bob")[0] == call(url, key="carol")[0] == 404
        assert call(url, key="alice")[0] == 200


def test_with_an_operator_key_the_secret_is_in_the_path():
    with running_gateway(lambda _: "Warm.", api_key="operator") as gateway:
        url = f"{gateway.address}/sessions/alice"
        assert call(f"{url}~{SECRET}{CHAT}", "POST", ASK)[0] == 401
        status, content = call(url + CHAT, "POST", ASK, key="operator")
        assert status == 401
        assert "~<secret>" in content["error"]["message"]
        with openai.OpenAI(base_url=f"{url}~{SECRET}/v1", api_key="operator", max_retries=0) as client:
            client.chat.completions.create(model="m", **ASK)
        assert call(f"{url}~{SECRET}", key="operator")[0] == 200
        assert [status for status, _ in requests_of_a_session(f"{url}~x", key="operator")] == [404, 404, 404]


@pytest.mark.parametrize(
    "reward",
    ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "1e300", "-1e10", "true", '"1"', "[1]", "{}"],
)
def test_rewards_that_are_no_bounded_numbers_are_rejected(reward):
    with running_gateway(lambda _: "Warm.") as gateway:
        url = gateway.base_url("alice")
        call(url + CHAT, "POST", ASK)
        raw = f'{{"reward_info": {{"reward": {reward}}}}}'.encode()
        status, content = call(f"{url}/reward_info", "POST", raw=raw)
        assert (status, content["error"]["type"]) == (400, "invalid_request_error")
        assert call(url)[1]["reward_info"] is None


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b'{"reward_info": {"reward": -3, "steps": [1, {"a": null}], "note": null}}', 200),
        (b'{"reward_info": {}}', 200),
        (b'{"reward_info": {"reward": null}}', 200),
        (b'{"reward_info": [1.0]}', 400),
        (b'{"reward_info": null}', 400),
        (b"[]", 400),
        (b'{"reward_info": {"note": 1' + b"0" * 30 + b"}}", 400),
        (b'{"reward_info": {"note": "' + b"x" * 70_000 + b'"}}', 413),
        (b'{"reward_info": {"note": ' + b"[" * 40 + b"]" * 40 + b"}}", 400),
        (b'{"reward_info": {"note": ' + b"[" * 30_000 + b"]" * 30_000 + b"}}", 400),
    ],
    ids=range(10),
)
def test_reward_info_is_validated_and_bounded(raw, status):
    with running_gateway(lambda _: "Warm.") as gateway:
        url = gateway.base_url("alice")
        call(url + CHAT, "POST", ASK)
        assert call(f"{url}/reward_info", "POST", raw=raw)[0] == status
        expected = json.loads(raw)["reward_info"] if status == 200 else None
        assert call(url)[1]["reward_info"] == expected, "stored as it was sent"


def test_the_number_of_sessions_is_limited():
    with running_gateway(lambda _: "Warm.", max_sessions=2) as gateway:
        urls = [gateway.base_url(name) for name in "abc"]
        assert [call(url + CHAT, "POST", ASK)[0] for url in urls] == [200, 200, 503]
        assert (
            call(f"{urls[2]}/v1/messages", "POST", {**ASK, "max_tokens": 3})[1]["error"]["type"] == "overloaded_error"
        )
        assert call(urls[0], "DELETE")[0] == 200
        assert call(urls[2] + CHAT, "POST", ASK)[0] == 200
        assert call(f"{gateway.address}/sessions/{'n' * 300}~x{CHAT}", "POST", ASK)[0] == 400


def test_the_stored_size_of_a_session_is_limited():
    with running_gateway(lambda _: "Warm.", max_bytes=20_000) as gateway:
        url, statuses = gateway.base_url("alice"), []
        for number in range(20):
            ask = {"messages": [{"role": "user", "content": f"{number}", "unused": "x" * 2000}]}
            statuses.append(call(url + CHAT, "POST", ask)[0])
        assert statuses == sorted(statuses)
        assert 2 < statuses.count(200) < 8
        assert statuses[-1] == 403
        assert len(call(url)[1]["nodes"]) == statuses.count(200)


def test_sessions_without_requests_are_idle():
    sessions = Sessions()
    old, busy, new = (GatewaySession(name, None) for name in ("old", "busy", "new"))
    for session in (old, busy, new):
        sessions.add(session, "secret")

    async def expire():
        old.last_used = time.monotonic() - 100
        with busy.under_way():
            busy.last_used = time.monotonic() - 100
            return sessions.idle(60)

    assert asyncio.run(expire()) == [old]
    asyncio.run(sessions.close(old))
    with pytest.raises(ApiError):
        sessions.get("old", "secret")
    assert len(sessions) == 2


async def test_agents_in_training_have_urls_with_secrets_of_their_own():
    gateway = WorkerGateway(None)
    async with (
        gateway.session(GatewaySession("a" * 32, None)) as one,
        gateway.session(GatewaySession("b" * 32, None)) as other,
    ):
        name, _, secret = one.rpartition("~")
        assert len(secret) >= 43, "256 bits"
        assert secret != other.rpartition("~")[2]
        assert (await asyncio.to_thread(call, one))[0] == 200
        for url in (name, f"{name}~{'x' * 43}", f"{name}~{other.rpartition('~')[2]}", f"{other}~{secret}"):
            assert {status for status, _ in await asyncio.to_thread(requests_of_a_session, url, "none")} == {404}
            assert (await asyncio.to_thread(call, url + CHAT, "POST", ASK, "none"))[0] == 404
        assert (await asyncio.to_thread(call, one, "DELETE"))[0] == 200
        assert (await asyncio.to_thread(call, other))[0] == 200


def test_the_error_of_an_agent_is_stored_without_the_secret():
    base_url = f"http://127.0.0.1:80/sessions/alice~{SECRET}"
    try:
        try:
            raise OSError(f"no connection to {base_url}/v1/messages")
        except OSError as error:
            raise ValueError(f"404 for {base_url}") from error
    except ValueError as error:
        failed = describe_failure(error, base_url)
    assert str(failed) == "run_agent raised ValueError: 404 for http://127.0.0.1:80/sessions/alice~<secret>"
    trace = "".join(traceback.format_exception(failed))
    assert "OSError: no connection to" in trace
    assert SECRET not in trace
