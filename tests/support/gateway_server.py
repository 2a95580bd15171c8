"""A gateway in a thread with a scripted model: real HTTP, real tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from tests.support.tiny import tiny_tokenizer
from verl.agent.gateway.app import GatewayApp
from verl.agent.gateway.session import GatewaySession, Model, Sessions
from verl.inference.serving.openai_requests import ModelInfo
from verl.types.request import Output, Request
from verl.utils.http_server.server import ConnectionLimits, LocalServer
from verl.utils.tool_calls import get_parser

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role if m.role in ('system', 'assistant') else 'user' }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = 1


class CountingTokenizer:
    """The tiny tokenizer; `texts` records every text that it tokenized."""

    def __init__(self) -> None:
        self._own = tiny_tokenizer()
        self._own.chat_template = TEMPLATE
        self.texts: list[str] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._own(text, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # while it is unpickled in a text worker
            raise AttributeError(name)
        return getattr(self._own, name)


class ScriptedModel:
    """Generates `answer(request number)` token by token, each with a distinct log-prob."""

    def __init__(self, answer: Callable[[int], str], pace_s: float = 0.0) -> None:
        self.tokenizer = CountingTokenizer()
        self._answer, self._pace_s = answer, pace_s
        self.requests: list[Request] = []
        self.aborted = 0

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        ids = self.tokenizer._own(self._answer(len(self.requests)), add_special_tokens=False)["input_ids"]
        self.requests.append(request)
        ids = [*ids, END][: request.params.max_new_tokens]
        reason = "stop" if ids[-1] == END else "length"
        finished = False
        try:
            for index, token in enumerate(ids):
                await asyncio.sleep(self._pace_s)
                log_prob = -0.001 * (index + 1)
                stopped = self._stopped(ids[: index + 1], request.params.stop)
                finished = stopped or index == len(ids) - 1
                finish_reason = ("stop" if stopped else reason) if finished else ""
                yield Output([token], [log_prob], [7], finish_reason, [log_prob], [log_prob])
                if finished:
                    return
        finally:
            self.aborted += not finished

    def _stopped(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        return any(text in self.tokenizer.decode(ids) for text in stop)


class RunningGateway:
    """A running gateway: its model, sessions and address."""

    def __init__(self, model: ScriptedModel, sessions: Sessions, address: str) -> None:
        self.model, self.sessions, self.address = model, sessions, address

    def base_url(self, name: str) -> str:
        """The base URL of a session as agents receive it, with the secret of the session."""
        return f"{self.address}/sessions/{name}~secret-of-{name}"


@contextlib.contextmanager
def running_gateway(
    answer: Callable[[int], str],
    max_model_len: int = 4096,
    pace_s: float = 0.0,
    ping_s: float = 10.0,
    api_key: str | None = None,
    max_sessions: int | None = None,
    template: str = TEMPLATE,
    text_seconds: float = 10.0,
    **session: Any,
) -> Iterator[RunningGateway]:
    """Run a gateway until the block ends. A session is created by its first generation request.

    `session`: arguments of GatewaySession.
    """
    scripted = ScriptedModel(answer, pace_s)
    tokenizer = scripted.tokenizer
    tokenizer._own.chat_template = template
    model_info = ModelInfo(("tiny",), max_model_len, 264, frozenset({END}), 1, False, 16)
    model = Model(model_info, tokenizer, get_parser("hermes"), seconds=text_seconds)
    sessions = Sessions(lambda name: GatewaySession(name, scripted.generate, **session), max_sessions)
    app = GatewayApp(sessions, model, ping_s=ping_s, api_key=api_key)
    started, address, loop, stop = threading.Event(), [""], asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with LocalServer(app, "a test", ConnectionLimits()) as address[0]:
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        if not started.wait(10):
            raise RuntimeError("the gateway of the test did not start within 10 s")
        yield RunningGateway(scripted, sessions, address[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
        model.close()
