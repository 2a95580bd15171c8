"""SGLang's engine in a thread, as a `TokenServer`, and its `StepEngine`."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch

from verl.inference.sequence import Sequence
from verl.types.request import Request, TopLogProbs
from verl.utils.process_tree import die_with_parent
from verl.workers.rollout.third_party import (
    PROBE_PROMPT,
    PROBE_TOP_TOKENS,
    ChunkDetails,
    OnChunks,
    ServerStepEngine,
    TokenChunk,
    check_reported_log_probs,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TESTED_VERSIONS = ("0.5.23",)
# Maximum time until aborted requests have left SGLang's batch.
_FLUSH_TIMEOUT_S = 60.0
# Iterations of the event loop without a token after which no token is in transit within this process.
_QUIET_ITERATIONS = 16
_ALL_TOKENS = 1 << 30
# Logit bias of a token that must not be sampled.
_BANNED = -1e9


class SGLangStepEngine(ServerStepEngine):
    """The step engine of SGLang. Its log-probs are at the temperature, before top-k, top-p and min-p, which is checked
    before the first request."""

    server: SGLangServer

    def __init__(
        self,
        thread: EngineThread,
        eos_token_ids: frozenset[int],
        max_length: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`eos_token_ids`: see `sampling_arguments`."""

        def connect(on_chunks: OnChunks) -> SGLangServer:
            self.server = SGLangServer(thread, eos_token_ids, on_chunks)
            return self.server

        super().__init__(connect, max_length, log_probs_after_filtering=False, reports_details=True)
        self._check_log_probs = partial(
            check_reported_log_probs,
            f"SGLang {thread.version}",
            lambda temperature, top_k: self.server.top_log_probs(PROBE_PROMPT, temperature, top_k, PROBE_TOP_TOKENS),
            vocab_size,
            log_probs_after_filtering=False,
            dtype=dtype,
        )
        self._log_probs_checked = False

    def check(self, request: Request) -> None:
        super().check(request)
        params, earlier = request.params, request.resume_from
        if earlier and earlier.token_ids and (params.presence_penalty or params.frequency_penalty):
            raise ValueError(
                f"request {request.id!r}: SGLang treats the tokens of resume_from as prompt, to which presence_penalty"
                " and frequency_penalty do not apply. Leave them out, or use rollout.name=native."
            )

    def step(self) -> list[Sequence]:
        if not self._log_probs_checked:
            self.server.resume()
            self._log_probs_checked = self._check_log_probs()
        return super().step()


class _Stream:
    """The task of a request, and its id in SGLang.

    Ids are used once, and none is a prefix of another: SGLang aborts all requests whose id begins with an aborted id.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.rid = ""


class SGLangServer:
    """A `TokenServer` with one stream per request. A pause suspends SGLang's requests in place."""

    def __init__(self, thread: EngineThread, eos_token_ids: frozenset[int], on_chunks: OnChunks) -> None:
        """`eos_token_ids`: see `sampling_arguments`."""
        self._thread = thread
        self._eos_token_ids = eos_token_ids
        self._on_chunks = on_chunks
        self._reported = 0
        """Number of reported chunks."""
        self._streams: dict[str, _Stream] = {}
        self._serial = 0
        self._cache_key = 0
        """Namespace of the prefix cache."""
        self._paused = False

    def start(self, sequences: Iterable[Sequence]) -> None:
        cache_key = str(self._cache_key)
        requests = {
            sequence.request.id: SGLangRequest.from_sequence(sequence, cache_key, self._eos_token_ids)
            for sequence in sequences
        }

        async def start_all() -> None:
            for name, request in requests.items():
                self._streams[name] = stream = _Stream()
                stream.task = asyncio.create_task(self._follow(name, stream, request))

        self._thread.call(start_all())

    def abort(self, ids: Iterable[str]) -> None:
        async def abort_all() -> None:
            for name in ids:
                stream = self._streams.pop(name, None)
                if stream is None or stream.task is None:
                    continue
                if stream.rid:  # otherwise it was not sent to SGLang yet
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

    def reset_prefix_cache(self) -> None:
        """SGLang cannot flush its cache while requests run: later requests use another cache key."""
        self._cache_key += 1

    def flush_kv(self) -> None:
        """Wait until no request runs in SGLang, and flush its cache. Called after all requests were aborted."""
        self.resume()
        if not self._thread.call(self._thread.manager.flush_cache(timeout_s=_FLUSH_TIMEOUT_S)).success:
            raise RuntimeError(
                f"rollout: SGLang still runs requests {_FLUSH_TIMEOUT_S:.0f} s after all of them were aborted."
            )

    def top_log_probs(self, prompt: Iterable[int], temperature: float, top_k: int, count: int) -> dict[int, float]:
        """Log-probs of the `count` most likely next tokens, as SGLang reports them."""

        async def generate() -> dict[str, Any]:
            from sglang.srt.managers.io_struct import GenerateReqInput

            sampling = {"temperature": temperature, "top_k": top_k, "max_new_tokens": 1, "ignore_eos": True}
            request = GenerateReqInput(
                input_ids=list(prompt),
                sampling_params=sampling,
                extra_key=uuid.uuid4().hex,  # no cached KV, with which rounding differs
                return_logprob=True,
                top_logprobs_num=count,
            )
            return await anext(self._thread.manager.generate_request(request))

        return dict(_token_log_probs(self._thread.call(generate())["meta_info"]["output_top_logprobs"][0]))

    def close(self) -> None:
        self._thread.close()

    async def _pause(self) -> None:
        """Pause SGLang, and wait until all tokens sampled before the pause were reported.

        SGLang replies in order: its reply to `get_internal_state` arrives after the last of these tokens.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._thread.manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        self._paused = True
        await self._thread.manager.get_internal_state()
        quiet = 0
        while quiet < _QUIET_ITERATIONS:
            before = self._reported
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._reported == before else 0

    async def _follow(self, name: str, stream: _Stream, request: SGLangRequest) -> None:
        """Report the chunks of one request until its end."""
        try:
            for sampling in request.phases:
                self._serial += 1
                stream.rid = f"{self._serial}:{name}"
                await self._follow_phase(name, request, stream.rid, sampling)
        except Exception as error:  # noqa: BLE001 - the request fails with it
            self._report(TokenChunk(name, [], [], finished=True, error=f"{type(error).__name__}: {error}"))
        self._streams.pop(name, None)

    async def _follow_phase(self, name: str, request: SGLangRequest, rid: str, sampling: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        generate_request = GenerateReqInput(
            input_ids=list(request.token_ids),
            sampling_params=sampling,
            rid=rid,
            extra_key=request.cache_key,
            return_logprob=True,
            logprob_start_len=0 if request.prompt_log_probs else -1,
            top_logprobs_num=request.top_log_probs,
            stream=True,
        )
        received, is_last_phase = 0, sampling is request.phases[-1]
        async for reply in self._thread.manager.generate_request(generate_request):
            meta, is_first = reply["meta_info"], received == 0
            # Depending on its options, SGLang reports all tokens or only new tokens; new tokens are the last.
            new, received = meta["completion_tokens"] - received, meta["completion_tokens"]
            tokens = reply["output_ids"][-new:] if new else []
            log_probs = [entry[0] for entry in meta["output_token_logprobs"][-new:]] if new else []
            request.token_ids += tokens
            reason = meta["finish_reason"]
            error = reason["message"] if reason and reason["type"] == "abort" else None
            finished = bool(reason) and (is_last_phase or error is not None)
            details = _chunk_details(request, meta, new, is_first)
            self._report(TokenChunk(name, tokens, log_probs, finished, error, details))

    def _report(self, chunk: TokenChunk) -> None:
        self._reported += 1
        self._on_chunks([chunk])


@dataclass(slots=True)
class SGLangRequest:
    """A request to SGLang: its tokens so far, and consecutive phases of sampling."""

    token_ids: list[int]
    phases: list[dict[str, Any]]
    """SGLang's sampling parameters."""
    cache_key: str
    """Only requests with the same key share KV."""
    top_log_probs: int
    prompt_log_probs: bool

    @classmethod
    def from_sequence(cls, sequence: Sequence, cache_key: str, eos_token_ids: frozenset[int]) -> SGLangRequest:
        """The request that continues a sequence from its tokens to its end. `eos_token_ids`: see `sampling_arguments`.

        SGLang's `min_new_tokens` needs a tokenizer. Instead, end tokens are banned by logit biases in a first phase of
        that length.
        """
        params = sequence.params
        arguments = sampling_arguments(sequence, eos_token_ids)
        total, minimum = arguments["max_new_tokens"], arguments.pop("min_new_tokens") if params.end_token_ids else 0
        biases = (arguments["logit_bias"] or {}) | {str(token): _BANNED for token in params.end_token_ids}
        without_end: dict[str, Any] = {
            "max_new_tokens": minimum,
            "logit_bias": biases,
            "stop_token_ids": [],
            "ignore_eos": True,
        }
        phases = [arguments | without_end] if minimum else []
        if total > minimum:
            phases.append(arguments | {"min_new_tokens": 0, "max_new_tokens": total - minimum})
        return cls(list(sequence.token_ids), phases, cache_key, params.top_log_probs, params.prompt_log_probs)


def sampling_arguments(sequence: Sequence, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """SGLang's sampling parameters that continue a sequence from its tokens to its end.

    `eos_token_ids`: the tokens at which SGLang by itself ends every response of this model. If the request does not end
    at one of them, SGLang must ignore all of them, and the step engine finds the end.
    """
    params = sequence.params
    if params.greedy:
        sampling: dict[str, Any] = {"temperature": 0.0}
    else:
        sampling = {
            "temperature": params.temperature,
            "top_k": params.top_k if params.top_k > 0 else _ALL_TOKENS,
            "top_p": params.top_p,
            "min_p": params.min_p,
        }
    return sampling | {
        "max_new_tokens": sequence.max_length - len(sequence.token_ids),
        "min_new_tokens": max(0, min(sequence.min_length, sequence.max_length) - len(sequence.token_ids)),
        "stop_token_ids": sorted(params.end_token_ids),
        "ignore_eos": not eos_token_ids <= params.end_token_ids,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
    }


def _chunk_details(request: SGLangRequest, meta: dict[str, Any], new: int, is_first: bool) -> ChunkDetails | None:
    """Details of a chunk of `new` tokens. SGLang reports log-probs of the prompt, except its first token, with the
    first chunk."""
    if not is_first and not request.top_log_probs:
        return None
    top = meta["output_top_logprobs"][-new:] if request.top_log_probs and new else []
    prompt: list[float] = []
    prompt_top: list[Any] = []
    if is_first and request.prompt_log_probs:
        prompt = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        prompt_top = meta["input_top_logprobs"][1:] if request.top_log_probs else [[]] * len(prompt)
    return ChunkDetails(
        meta["cached_tokens"] if is_first else 0,
        [_token_log_probs(entries) for entries in top],
        prompt,
        [_token_log_probs(entries) for entries in prompt_top],
    )


def _token_log_probs(entries: Iterable[tuple[float, int, Any]]) -> TopLogProbs:
    return [(token, log_prob) for log_prob, token, _ in entries]


class EngineThread:
    """Creates an engine, and calls its coroutines from any thread.

    Linux ends SGLang's processes when the thread that started them ends, so this thread lives as long as they do.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        created: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=[arguments, created], name="sglang", daemon=True)
        self._thread.start()
        self.engine = created.result()
        self.manager = self.engine.tokenizer_manager
        """The object behind SGLang's HTTP server; it has coroutines for the engine's methods, and more."""
        self.version: str = import_module("sglang").__version__

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Shut down the engine and its processes."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self, arguments: dict[str, Any], created: Future[Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            engine = _create_engine(arguments)
        except BaseException as error:  # noqa: BLE001 - raised in the constructor
            created.set_exception(error)
            return
        created.set_result(engine)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        engine.shutdown()


def _create_engine(arguments: dict[str, Any]) -> Any:
    """Create SGLang's `Engine`; ValueError for unknown arguments."""
    import sglang
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    if sglang.__version__ not in _TESTED_VERSIONS:
        logger.warning(
            "rollout: SGLang %s is not among the tested versions (%s).", sglang.__version__, _TESTED_VERSIONS
        )
    try:
        ServerArgs(**arguments)
    except TypeError as error:
        raise ValueError(f"engine_kwargs.sglang: {error}") from error

    class OwnedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

    return OwnedEngine(**arguments)


# Main functions of SGLang's processes: they end with the thread that started them.


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    die_with_parent()
    return Engine.run_scheduler_process_func(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    die_with_parent()
    return Engine.run_detokenizer_process_func(*args, **kwargs)
