"""Attacks on the gateway, also by an agent on the conversations of others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from urllib.parse import quote

from tests.attacks.support import protocol, requests
from tests.attacks.support.attack import HARMLESS, PROTOCOL, REJECTED, Attack, Read, http_request
from tests.attacks.support.inference_attacks import COMMON_NUMBERS, REJECTED_NUMBERS, grammar_attacks, text_attacks
from tests.attacks.support.keys import bearer
from tests.attacks.support.values import FILE_NAMES

__all__ = ["ATTACKER", "VICTIM", "VICTIM_SECRET", "connections", "malicious_requests"]

# The session of a regular agent that runs during the attack, and its secret, which attackers do not know.
VICTIM, VICTIM_SECRET = "victim", "secret-of-the-victim"
ATTACKER = "attacker-secret"
_MAX_BODY = 64 << 20

CHAT = requests.Endpoint(
    "/sessions/attack/v1/chat/completions",
    {
        "model": "any",
        "max_tokens": 2,
        "messages": [{"role": "user", "content": "hi"}],
        "logit_bias": {},
        "stop_token_ids": [5],
    },
    numbers=(*COMMON_NUMBERS, "max_completion_tokens"),
    texts=("messages.0.content", "messages.0.role", "model"),
    others=("messages", "tools", "tool_choice", "chat_template_kwargs", "response_format", "stop"),
    rejected=REJECTED_NUMBERS,
    max_body=_MAX_BODY,
    headers=bearer(ATTACKER),
)
MESSAGES = requests.Endpoint(
    "/sessions/attack-2/v1/messages",
    {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]},
    numbers=("max_tokens", "temperature", "top_k", "top_p"),
    texts=("messages.0.content", "system"),
    others=("messages", "tools", "tool_choice", "stop_sequences", "stream", "thinking"),
    rejected={key: REJECTED_NUMBERS[key] for key in ("max_tokens", "temperature", "top_p")},
    max_body=8 << 20,  # the limit is attacked at the other endpoint
    headers={"X-Api-Key": ATTACKER},
)
REWARD = requests.Endpoint(
    "/sessions/attack/reward_info",
    {"reward_info": {"reward": 1.0}},
    numbers=("reward_info.reward",),
    others=("reward_info",),
    max_body=8 << 20,
    headers=bearer(ATTACKER),
)


def malicious_requests(seed: int) -> Iterator[Attack]:
    rng = random.Random(seed)
    for endpoint in (CHAT, MESSAGES, REWARD):
        yield from requests.field_attacks(endpoint)
        yield from requests.large_attacks(endpoint)
        yield from requests.body_attacks(endpoint)
        yield from requests.random_attacks(endpoint, rng, 40)
    yield from requests.header_attacks(CHAT)
    yield from protocol.framing_attacks(CHAT)
    yield from text_attacks(CHAT)
    yield from text_attacks(MESSAGES)
    yield from grammar_attacks(CHAT)
    yield from _other_conversations()
    yield from _names()


def connections() -> Iterator[Attack]:
    yield from protocol.slow_attacks(CHAT)
    yield from protocol.flood_attacks(CHAT)


def _other_conversations() -> Iterator[Attack]:
    """Reading, rewarding and deleting a conversation without its secret.

    A session is a name and a secret: a request for a response with another secret opens a session of its own.
    """
    base = f"/sessions/{VICTIM}"
    reward = b'{"reward_info": {"reward": 1000.0}}'
    targets = [
        ("GET", base, b""),
        ("DELETE", base, b""),
        ("POST", f"{base}/reward_info", reward),
        ("GET", f"{base}~", b""),
        ("DELETE", f"{base}~{VICTIM_SECRET[:-1]}", b""),
        ("POST", f"{base}~{VICTIM}/reward_info", reward),
        ("GET", f"/sessions/attack/../{VICTIM}", b""),
        ("GET", f"/sessions//{VICTIM}", b""),
        ("DELETE", f"{base}/", b""),
        ("GET", f"{base}%2f", b""),
        ("GET", "/sessions/%76ictim", b""),
        ("GET", "/sessions", b""),
        ("GET", "/sessions/*", b""),
    ]
    keys = {
        "none": {"Authorization": ""},
        "other": bearer(ATTACKER),
        "empty": {"Authorization": "Bearer "},
        "prefix": bearer(VICTIM_SECRET[:-1]),
        "name": bearer(VICTIM),
        "any": bearer("any"),
        "x-api-key": {"X-Api-Key": ATTACKER},
        "non-ascii": bearer("\u00e9"),
        "basic": {"Authorization": "Basic Og=="},
    }
    for method, path, body in targets:
        for kind, headers in keys.items():
            steps = (*http_request(method, path, body, headers), Read(method))
            yield Attack(f"{method} {path} key-{kind}", steps, REJECTED)
    for api, endpoint in (("chat/completions", CHAT), ("messages", MESSAGES)):
        for kind, headers in {"another": bearer("another"), "none": {"Authorization": ""}}.items():
            steps = http_request("POST", f"{base}/v1/{api}", json.dumps(endpoint.valid).encode(), headers)
            yield Attack(f"POST {base}/v1/{api} key-{kind}", (*steps, Read("POST")), HARMLESS)


def _names() -> Iterator[Attack]:
    """Sessions that do not exist are not created by GET and DELETE, whatever their name."""
    for kind, name in FILE_NAMES.items():
        if kind in ("empty", "10-KB", "many-parents", "4096-bytes", "2000-directories"):
            continue
        path = f"/sessions/unknown-{quote(name, safe='')}"
        for method in ("GET", "DELETE"):
            steps = (*http_request(method, path, b"", bearer(ATTACKER)), Read(method))
            yield Attack(f"{method} unknown-session {kind}", steps, REJECTED)
        post = requests.Endpoint(
            f"/sessions/name-{quote(name, safe='')}/v1/chat/completions", CHAT.valid, headers=bearer(ATTACKER)
        )
        attack = requests.post(post, "", json.dumps(CHAT.valid).encode(), HARMLESS)
        yield Attack(f"POST session-name {kind}", attack.steps, attack.allowed)
    for number in range(200):
        steps = (*http_request("GET", f"/sessions/none-{number}", b"", bearer(ATTACKER)), Read())
        yield Attack(f"GET none-{number}", steps, REJECTED)
    long_name = http_request("GET", "/sessions/" + "x" * 12_000, b"", bearer(ATTACKER))
    yield Attack("GET long-name", (*long_name, Read()), PROTOCOL)
