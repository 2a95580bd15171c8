"""TokenStream: somebody in an event loop who waits for tokens that an engine's thread samples."""

from __future__ import annotations

import asyncio
import contextlib

from verl.types.request import Output

__all__ = ["TokenStream", "since", "wake"]


class TokenStream:
    """For one request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.more = asyncio.Event()
        """There may be more tokens, or the answer is finished."""


def wake(streams: list[TokenStream]) -> None:
    """From any thread: one call into each event loop, however many wait there."""
    by_loop: dict[asyncio.AbstractEventLoop, list[TokenStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    for loop, waiting in by_loop.items():
        # A loop that was closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_all, waiting)


def since(output: Output, position: int, finish_reason: str = "") -> Output:
    """What came after `position`. The engine may be appending: the versions are written last."""
    here = slice(position, len(output.versions))
    return Output(
        output.token_ids[here],
        output.log_probs[here],
        output.versions[here],
        finish_reason,
        output.raw_log_probs[here],
        output.sampled_log_probs[here],
        output.top_log_probs[here],
        output.prompt_log_probs,
        output.prompt_top_log_probs,
    )


def _set_all(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.more.set()
