"""The attack surface of every server: its endpoints, and the attacks that only it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.attacks.support import gateway_attacks, inference_attacks, sandbox_attacks, search_attacks
from tests.attacks.support.attack import Attack

__all__ = ["SURFACES", "Surface"]


@dataclass(frozen=True)
class Surface:
    requests: Callable[[int], Iterator[Attack]]
    """Malicious requests of a seed."""
    connections: Callable[[], Iterator[Attack]]
    """Slow and very many connections."""


SURFACES = {
    "sandbox": Surface(sandbox_attacks.malicious_requests, sandbox_attacks.connections),
    "search": Surface(search_attacks.malicious_requests, search_attacks.connections),
    "inference": Surface(inference_attacks.malicious_requests, inference_attacks.connections),
    "gateway": Surface(gateway_attacks.malicious_requests, gateway_attacks.connections),
}
