"""The server on top of token streams: what is reported of a request that the engine ends."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

from verl.workers.rollout.streaming_server import StreamingServer


class OneEventSource:
    engine, log, max_streams = "SomeEngine 1.2", "the file /some.log", 4

    def __init__(self, events) -> None:
        self.events = events

    def build_request(self, sequence):
        return sequence

    async def stream(self, request, generated):
        for event in self.events:
            yield event

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([([5], [-1.0], "out_of_blocks")], ["SomeEngine 1.2", "'out_of_blocks'", "/some.log"]),
        ([([5], [-1.0], None)], ["SomeEngine 1.2", "without a finish reason"]),
    ],
)
def test_the_error_of_a_failed_request_names_the_engine(events, words):
    chunks = queue.Queue()
    server = StreamingServer(OneEventSource(events), lambda new: [chunks.put(chunk) for chunk in new])
    try:
        server.start([SimpleNamespace(request=SimpleNamespace(id="a"))])
        while not (chunk := chunks.get(timeout=30)).finished:
            pass
        assert all(word in str(chunk.error) for word in words), chunk.error
    finally:
        server.close()
