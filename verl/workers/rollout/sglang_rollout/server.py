"""SGLangServer: SGLang's engine as a server of tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

from verl.inference.sequence import Sequence
from verl.types.request import TopLogProbs
from verl.workers.rollout.served import Details, Piece, Tell
from verl.workers.rollout.sglang_rollout.engine_thread import EngineThread
from verl.workers.rollout.sglang_rollout.sampling import Asked

__all__ = ["SGLangServer"]

# Longest wait until those who were aborted have left SGLang's batch.
_FLUSH_S = 60.0
# Turns of the event loop without a token after which none is on its way within this process.
_QUIET_TURNS = 16


class _Stream:
    """What is under way for a request: its task, and the name that SGLang knows it by.

    Each name is used once, and none is the beginning of another: SGLang aborts all that begin with what it is given.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.rid = ""


class SGLangServer:
    """One stream for each request. SGLang is paused in place: what it runs stays where it is."""

    def __init__(self, thread: EngineThread, own_ends: frozenset[int], tell: Tell) -> None:
        """`own_ends`: see `Asked.of`."""
        self._thread = thread
        self._own_ends = own_ends
        self._tell = tell
        self._told = 0
        self._streams: dict[str, _Stream] = {}
        self._serial = 0
        self._epoch = 0
        self._paused = False

    def start(self, sequences: Iterable[Sequence]) -> None:
        key = str(self._epoch)
        asked = {s.request.id: Asked.of(s, key, self._own_ends) for s in sequences}

        async def start_all() -> None:
            for name, one in asked.items():
                self._streams[name] = stream = _Stream()
                stream.task = asyncio.create_task(self._follow(name, stream, one))

        self._thread.call(start_all())

    def abort(self, ids: Iterable[str]) -> None:
        async def abort_all() -> None:
            for name in ids:
                stream = self._streams.pop(name, None)
                if stream is None or stream.task is None:
                    continue
                if stream.rid:  # else SGLang has not heard of it
                    self._thread.manager.abort_request(stream.rid)
                stream.task.cancel()

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
        if not self._thread.call(self._thread.manager.flush_cache(timeout_s=_FLUSH_S)).success:
            raise RuntimeError(f"rollout: {_FLUSH_S:.0f} s after all requests were aborted, SGLang still runs some.")

    def likeliest(self, prompt: Iterable[int], temperature: float, top_k: int, count: int) -> dict[int, float]:
        """Log-probs of the likeliest next tokens, as SGLang reports them."""

        async def ask() -> dict[str, Any]:
            from sglang.srt.managers.io_struct import GenerateReqInput

            sampling = {"temperature": temperature, "top_k": top_k, "max_new_tokens": 1, "ignore_eos": True}
            request = GenerateReqInput(
                input_ids=list(prompt),
                sampling_params=sampling,
                extra_key=uuid.uuid4().hex,  # of nobody's KV: it would round otherwise
                return_logprob=True,
                top_logprobs_num=count,
            )
            return await anext(self._thread.manager.generate_request(request))

        return dict(_likeliest(self._thread.call(ask())["meta_info"]["output_top_logprobs"][0]))

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

    async def _follow(self, name: str, stream: _Stream, asked: Asked) -> None:
        """Tell of what comes for one request, until its end."""
        try:
            for sampling in asked.phases:
                self._serial += 1
                stream.rid = f"{self._serial}:{name}"
                await self._follow_phase(name, asked, stream.rid, sampling)
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            self._say(Piece(name, [], [], finished=True, error=f"{type(error).__name__}: {error}"))
        self._streams.pop(name, None)

    async def _follow_phase(self, name: str, asked: Asked, rid: str, sampling: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=list(asked.token_ids),
            sampling_params=sampling,
            rid=rid,
            extra_key=asked.key,
            return_logprob=True,
            logprob_start_len=0 if asked.prompt_log_probs else -1,
            top_logprobs_num=asked.top_log_probs,
            stream=True,
        )
        count, last = 0, sampling is asked.phases[-1]
        async for answer in self._thread.manager.generate_request(request):
            said, first = answer["meta_info"], count == 0
            # Whether SGLang tells all so far or what is new, the new ones are the last.
            new, count = said["completion_tokens"] - count, said["completion_tokens"]
            tokens = answer["output_ids"][-new:] if new else []
            log_probs = [entry[0] for entry in said["output_token_logprobs"][-new:]] if new else []
            asked.token_ids += tokens
            ended = said["finish_reason"]
            error = ended["message"] if ended and ended["type"] == "abort" else None
            finished = bool(ended) and (last or error is not None)
            self._say(Piece(name, tokens, log_probs, finished, error, _details(asked, said, new, first)))

    def _say(self, piece: Piece) -> None:
        self._told += 1
        self._tell([piece])


def _details(asked: Asked, said: dict[str, Any], new: int, first: bool) -> Details | None:
    """SGLang says of the prompt with the first token, and nothing of its first one."""
    if not first and not asked.top_log_probs:
        return None
    top = said["output_top_logprobs"][-new:] if asked.top_log_probs and new else []
    prompt: list[float] = []
    prompt_top: list[Any] = []
    if first and asked.prompt_log_probs:
        prompt = [entry[0] for entry in said["input_token_logprobs"][1:]]
        prompt_top = said["input_top_logprobs"][1:] if asked.top_log_probs else [[]] * len(prompt)
    return Details(
        said["cached_tokens"] if first else 0,
        [_likeliest(entries) for entries in top],
        prompt,
        [_likeliest(entries) for entries in prompt_top],
    )


def _likeliest(entries: Iterable[tuple[float, int, Any]]) -> TopLogProbs:
    return [(token, log_prob) for log_prob, token, _ in entries]
