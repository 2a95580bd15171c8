"""Attacks on the search server."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.attacks.support import protocol, requests
from tests.attacks.support.attack import OVERLOADED, REJECTED, Attack, Repeated
from tests.attacks.support.keys import API_KEY, bearer

__all__ = ["connections", "malicious_requests"]

ENDPOINT = requests.Endpoint(
    "/retrieve",
    {"queries": ["green apples"], "topk": 3, "return_scores": True},
    numbers=("topk",),
    texts=("queries.0",),
    others=("queries", "return_scores"),
    rejected={"topk": ("0", "minus-1", "1.5", "1e-40", "1e308", "2**31", "2**63", "2**64-1", "minus-2**63")},
    max_body=8 << 20,
    headers=bearer(API_KEY),
)


def malicious_requests(seed: int) -> Iterator[Attack]:
    for generate in (
        requests.field_attacks,
        requests.large_attacks,
        requests.body_attacks,
        requests.header_attacks,
        requests.authentication_attacks,
        protocol.framing_attacks,
    ):
        yield from generate(ENDPOINT)
    yield from requests.random_attacks(ENDPOINT, random.Random(seed), 60)
    million_words = Repeated(b'{"queries": ["', b"apple pear ", 500_000, b'"]}')
    yield requests.post(ENDPOINT, "query million-words", million_words, OVERLOADED)
    many_words = Repeated(b'{"queries": ["', b"green ", 5_000, b'"]}')
    yield requests.post(ENDPOINT, "query 5000-words", many_words)
    million_queries = Repeated(b'{"queries": [', b'"apples",', 800_000, b'"x"]}')
    yield requests.post(ENDPOINT, "queries million", million_queries, REJECTED)
    most = Repeated(b'{"topk": 1000, "queries": [', b'"green apples",', 1023, b'"x"]}')
    yield requests.post(ENDPOINT, "queries 1024-topk-1000", most)
    long_words = Repeated(b'{"queries": ["', b"x" * 100_000, 20, b'"]}')
    yield requests.post(ENDPOINT, "query one-word-2-MB", long_words)


def connections() -> Iterator[Attack]:
    yield from protocol.slow_attacks(ENDPOINT)
    yield from protocol.flood_attacks(ENDPOINT)
