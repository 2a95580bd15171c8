"""SGLangServer: SGLang's engine as a server of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from verl.inference.sequence import Sequence
from verl.workers.rollout.served import Piece, Tell
from verl.workers.rollout.sglang_rollout.engine_thread import EngineThread
from verl.workers.rollout.sglang_rollout.sampling import sampling_arguments

__all__ = ["SGLangServer"]

# Longest wait until those who were aborted have left SGLang's batch.
_FLUSH_S = 60.0
# Turns of the event loop without a token after which none is on its way within this process.
_QUIET_TURNS = 16


class SGLangServer:
    """One stream for each request. SGLang is paused in place: what it runs stays where it is."""

    def __init__(self, thread: EngineThread, own_ends: frozenset[int], tell: Tell) -> None:
        """`own_ends`: see `sampling_arguments`."""
        self.cached_tokens = 0
        """Tokens of prompts whose KV was found in the prefix cache."""
        self._thread = thread
        self._own_ends = own_ends
        self._tell = tell
        self._told = 0
        # Of each request its stream, and the name that SGLang knows it by: one of its own every time it is started.
        self._streams: dict[str, tuple[asyncio.Task[None], str]] = {}
        self._serial = 0
        self._epoch = 0
        self._paused = False

    def start(self, sequences: Iterable[Sequence]) -> None:
        asked = [(sequence.request.id, self._asked(sequence)) for sequence in sequences]

        async def start_all() -> None:
            for name, request in asked:
                stream = asyncio.create_task(self._follow(name, request))
                self._streams[name] = (stream, request.rid)

        self._thread.call(start_all())

    def abort(self, ids: Iterable[str]) -> None:
        async def abort_all() -> None:
            for name in ids:
                stream, sglangs = self._streams.pop(name, (None, ""))
                if stream is not None:
                    self._thread.manager.abort_request(sglangs)
                    stream.cancel()

        self._thread.call(abort_all())

    def pause(self) -> None:
        self._thread.call(self._pause())

    def resume(self) -> None:
        if self._paused:
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput

            self._thread.call(self._thread.manager.continue_generation(ContinueGenerationReqInput()))
            self._paused = False

    def forget_prefixes(self) -> None:
        """SGLang drops no KV while somebody runs: newcomers look for theirs under another name."""
        self._epoch += 1

    def drop_kv(self) -> None:
        """When it returns nobody runs in SGLang, and nothing is cached. Only after all were aborted."""
        self.resume()
        self._thread.call(self._thread.manager.flush_cache(timeout_s=_FLUSH_S))

    def close(self) -> None:
        self._thread.close()

    async def _pause(self) -> None:
        """SGLang answers in order: what it says after a pause comes after every token it sampled before."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._thread.manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        self._paused = True
        await self._thread.manager.get_internal_state()
        quiet = 0
        while quiet < _QUIET_TURNS:
            before = self._told
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._told == before else 0

    def _asked(self, sequence: Sequence) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        self._serial += 1
        return GenerateReqInput(
            input_ids=list(sequence.token_ids),
            sampling_params=sampling_arguments(sequence, self._own_ends),
            rid=f"{sequence.request.id}#{self._serial}",
            extra_key=str(self._epoch),
            return_logprob=True,
            logprob_start_len=-1,
            stream=True,
        )

    async def _follow(self, name: str, request: Any) -> None:
        """Tell of what comes for one request, until its end."""
        count = 0
        try:
            async for answer in self._thread.manager.generate_request(request):
                said = answer["meta_info"]
                if count == 0:
                    self.cached_tokens += said["cached_tokens"]
                # Whether it tells all so far or what is new, the new ones are the last.
                new, count = said["completion_tokens"] - count, said["completion_tokens"]
                tokens = answer["output_ids"][-new:] if new else []
                log_probs = [entry[0] for entry in said["output_token_logprobs"][-new:]] if new else []
                ended = said["finish_reason"]
                error = ended["message"] if ended and ended["type"] == "abort" else None
                self._say(Piece(name, tokens, log_probs, finished=bool(ended), error=error))
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            self._say(Piece(name, [], [], finished=True, error=f"{type(error).__name__}: {error}"))
        self._streams.pop(name, None)

    def _say(self, piece: Piece) -> None:
        self._told += 1
        self._tell([piece])
