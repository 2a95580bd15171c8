"""GatewaySession: one trajectory with its tree, reward and in-flight requests. Sessions: the open sessions of a
gateway. Model: the tokenizer, parser and text workers that all sessions share."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import pickle
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agent.chat import ChatSettings
from verl.agent.gateway.requests import GatewayRequest, check_body, end_ids, prompt_ids, read_request, suffix_ids
from verl.agent.gateway.streamed_response import StreamedResponse
from verl.agent.gateway.tree import Message, RequestNode, ResponseNode, Tree
from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import HeavyRequest, ModelInfo, ParsedChatRequest, check_length
from verl.inference.serving.openai_responses import ResponseChunk
from verl.inference.serving.parsers import text_work_error
from verl.types.request import Output, Request
from verl.utils.tokenizer import (
    SHORT_TEXT,
    TextWorkers,
    TextWorkersBusy,
    TextWorkLimit,
    text_length,
    tokenizer_loader,
)
from verl.utils.tool_calls import HermesParser, Parser

__all__ = ["GatewaySession", "Generate", "Model", "Sessions"]

Generate = Callable[[Request], AsyncGenerator[Output, None]]
"""Yields the output of a request, in pieces if the engine streams; closing the generator aborts the request."""

# Size of the cache of end tokens, by template options.
_CACHED_ENDS = 256
# Templates may take time quadratic in the number of messages.
_SHORT_MESSAGES = 256
# Bodies up to this size are parsed in this process, in about a millisecond.
SHORT_BODY_BYTES = 64 * 1024
# Longest text of a template option that is rendered in this process.
_SHORT_OPTION = 64
_TEXT_WORK_TIMEOUT_S = 10.0
MAX_SESSION_BYTES = 2**30
_MAX_NAME = 200


class Model:
    """Parses and tokenises requests for all sessions.

    Short texts are processed in this process, longer ones in text workers, so that no client blocks the others.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        tokenizer: Any,
        parser: Parser,
        template_kwargs: Mapping[str, Any] | None = None,
        seconds: float = _TEXT_WORK_TIMEOUT_S,
        grammars: bool = True,
    ) -> None:
        """`seconds`: time limit of the text work of one request. `grammars`: whether the engine supports grammars."""
        self.model_info, self.tokenizer, self.parser = model_info, tokenizer, parser
        self._template_kwargs, self._grammars = dict(template_kwargs or {}), grammars
        self.workers = TextWorkers(tokenizer_loader(tokenizer), seconds, functions=[read_request, prompt_ids])
        self._ends: dict[str, frozenset[int]] = {}

    def start_workers(self) -> None:
        """Start the text workers now, not at the first long text. Blocks until they have started, for seconds."""
        self.workers.start()

    def close(self) -> None:
        """End the text workers."""
        self.workers.close()

    async def read(self, api: str, body: bytes | bytearray) -> GatewayRequest:
        """Parse a body sent to `api` (/v1/chat/completions or /v1/messages); ApiError if it is invalid."""
        check_body(body, self.model_info)
        arguments = (self.model_info, isinstance(self.parser, HermesParser), self._grammars)
        if len(body) <= SHORT_BODY_BYTES:
            try:
                return read_request(self.tokenizer, api, body, *arguments, heavy=False)
            except HeavyRequest:
                pass
        return await self._call(read_request, api, pickle.PickleBuffer(body), *arguments)

    async def prompt_ids(self, request: GatewayRequest) -> list[int]:
        """Token ids of the whole conversation."""
        return await self._tokenise(prompt_ids, request, request.chat.messages)

    async def suffix(self, request: GatewayRequest, messages: Sequence[Message], node: ResponseNode) -> list[int]:
        """Token ids of the messages after the response of `node`."""
        named = _with_tool_names(messages, node.reply)
        return await self._tokenise(suffix_ids, request, named, node.output.token_ids[-1:])

    async def ends(self, chat: ParsedChatRequest) -> frozenset[int]:
        """Ids of the tokens that end a response."""
        key = json.dumps(chat.options, sort_keys=True)
        if key not in self._ends:
            template_kwargs = {**self._template_kwargs, **chat.options}
            if _are_flags(chat.options):
                ids = end_ids(self.tokenizer, template_kwargs)
            else:
                ids = await self._call(end_ids, template_kwargs)
            if len(self._ends) >= _CACHED_ENDS:
                self._ends.clear()
            self._ends[key] = ids | self.model_info.eos_token_ids
        return self._ends[key]

    async def _tokenise(
        self, function: Callable[..., list[int]], request: GatewayRequest, messages: Sequence[Message], *more: Any
    ) -> list[int]:
        chat = request.chat
        options = {**self._template_kwargs, **chat.options}
        settings = ChatSettings.create(chat.tools, self.model_info.eos_token_ids, options)
        arguments = (settings, list(messages), *more, chat.generation.forced_prefix, self.model_info)
        length = text_length(messages) + len(request.scope)
        if length <= SHORT_TEXT and len(messages) <= _SHORT_MESSAGES and _are_flags(chat.options):
            return function(self.tokenizer, *arguments)
        return await self._call(function, *arguments)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self.workers.call(function, *arguments, heavy=True)
        except (TextWorkLimit, TextWorkersBusy) as error:
            raise text_work_error(error) from error


@dataclass(eq=False)
class GatewaySession:
    """One trajectory."""

    name: str
    """Public: it does not give access to the session."""
    generate: Generate
    max_turns: int | None = None
    """Maximum number of recorded responses; None: no limit."""
    max_bytes: int = MAX_SESSION_BYTES
    """Maximum memory of the recorded messages and tokens, as `Tree.stored_bytes` estimates it."""
    tree: Tree = field(default_factory=Tree)
    reward_info: dict[str, Any] | None = None
    closed: bool = False
    cut_off: int = 0
    """Number of responses whose client disconnected, or whose session was closed, before they finished."""
    on_full_context: Callable[[list[int]], None] | None = None
    """Called with the prompt tokens of a request if they fill the context, so that no response fits."""
    last_used: float = field(default_factory=time.monotonic)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _tree_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def add_request(self, request: GatewayRequest, model: Model) -> RequestNode:
        """Return the request's node in the tree, which is added if it is new. Only new messages are tokenised."""
        self._check_limits()
        async with self._tree_lock:  # two equal concurrent requests get the same node
            chat = request.chat
            lookup = self.tree.lookup(chat.messages, request.digests, chat.generation.forced_prefix)
            node = lookup.request
            if node is None:
                parent = lookup.parent
                tokens = model.prompt_ids(request) if parent is None else model.suffix(request, lookup.messages, parent)
                node = self.tree.add_request(lookup, await tokens, request.scope)
        prompt_ids = node.prompt_ids
        try:
            check_length(prompt_ids, model.model_info, "messages")
        except ApiError:
            if self.on_full_context is not None and prompt_ids:
                self.on_full_context(prompt_ids)
            raise
        return node

    def _check_limits(self) -> None:
        if self.max_turns is not None and len(self.tree.nodes) >= self.max_turns:
            raise ApiError(
                f"this session has reached its limit of {self.max_turns} responses (multi_turn.max_assistant_turns, or"
                " --max-session-turns).",
                status=403,
            )
        if self.tree.stored_bytes >= self.max_bytes:
            raise ApiError(
                f"this session has reached its limit of {self.max_bytes / 2**20:g} MB of messages and tokens"
                " (--max-session-mb).",
                status=403,
            )

    @property
    def in_flight(self) -> int:
        """Requests that are being processed."""
        return len(self._tasks)

    @property
    def is_unused(self) -> bool:
        """Whether nothing was recorded (neither requests nor a reward), and no request is in flight."""
        return not self.tree.counts and not self._tasks and self.reward_info is None

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Context in which the current task processes a request of this session. If `close` cancels the task, the
        context raises ApiError 410."""
        ended = ApiError("this session has ended.", status=410, code="no_session")
        if self.closed:
            raise ended
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.closed:
                raise ended from None
            raise
        finally:
            self._tasks.discard(task)
            self.last_used = time.monotonic()
            if not self._tasks:
                self._idle.set()

    async def respond(
        self, node: RequestNode, request: Request, response: StreamedResponse
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Generate the response in chunks. It is added to the tree before the last chunk is yielded."""
        finished, nodes_before = False, len(self.tree.nodes)
        try:
            async with contextlib.aclosing(self.generate(request)) as pieces:
                async for piece in pieces:
                    if piece.finish_reason == "abort":
                        raise ApiError("generation was stopped. Send the request again.", status=503)
                    chunk = response.push(piece)
                    finished = chunk.finish_reason is not None
                    if finished:
                        self.tree.add_response(node, response.output, response.reply, requested_at=nodes_before)
                    yield chunk
        except ValueError as error:  # the engine rejects the request
            raise ApiError(str(error)) from error
        except (GeneratorExit, asyncio.CancelledError):
            self.cut_off += not finished
            raise

    async def close(self) -> None:
        """Accept no more requests and cancel those in flight. Does not wait until their clients read the response."""
        self.closed = True
        self._idle.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await self._idle.wait()

    def state(self) -> dict[str, Any]:
        """The session as JSON. Nodes refer to each other by their index."""
        number = {id(node): index for index, node in enumerate(self.tree.nodes)}
        paths = self.tree.paths(keep_retries=False)
        return {
            "id": self.name,
            "status": "closed" if self.closed else "open",
            "requests": {**self.tree.counts, "cut_off": self.cut_off, "under_way": len(self._tasks)},
            "reward_info": self.reward_info,
            "nodes": [{"parent": number.get(id(node.request.parent)), **_node_state(node)} for node in self.tree.nodes],
            "rows": [{"nodes": [number[id(node)] for node in path.nodes], "trained": path.trained} for path in paths],
        }


class Sessions:
    """The open sessions, by a keyed hash of (name, secret).

    The hash is the index: neither the response nor its time depends on whether a session of this name exists under
    another secret, and secrets are not stored.
    """

    def __init__(self, create: Callable[[str], GatewaySession] | None = None, max_sessions: int | None = None) -> None:
        """`create`: creates a session at its first generating request; None: sessions are only added by `add`."""
        self._create, self._max_sessions = create, max_sessions
        self._hash_key = secrets.token_bytes(32)
        self._open: dict[bytes, GatewaySession] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: GatewaySession, secret: str) -> None:
        self._open[self._index(session.name, secret)] = session

    def get(self, name: str, secret: str) -> GatewaySession:
        """Return an open session; ApiError 404 if there is none with this name and this secret."""
        session = self._open.get(self._index(name, secret))
        if session is None:
            raise ApiError(
                "there is no session with this name and this secret, or it has ended.", status=404, code="no_session"
            )
        session.last_used = time.monotonic()
        return session

    @contextlib.contextmanager
    def use(self, name: str, secret: str) -> Iterator[GatewaySession]:
        """The session for a request that generates; created if necessary, removed again if nothing was recorded."""
        index = self._index(name, secret)
        if self._create is not None and index not in self._open:
            self._check_new(name)
            self._open[index] = self._create(name)
        session = self.get(name, secret)
        try:
            with session.under_way():
                yield session
        finally:
            if self._create is not None and session.is_unused and self._open.get(index) is session:
                del self._open[index]

    async def close(self, session: GatewaySession) -> None:
        """End a session and its in-flight requests."""
        self._open = {index: other for index, other in self._open.items() if other is not session}
        await session.close()

    def idle(self, seconds: float) -> list[GatewaySession]:
        """Sessions without a request for this time."""
        before = time.monotonic() - seconds
        return [session for session in self._open.values() if session.last_used < before and not session.in_flight]

    def all(self) -> list[GatewaySession]:
        return list(self._open.values())

    def _check_new(self, name: str) -> None:
        if len(name) > _MAX_NAME:
            raise ApiError(f"the session name has {len(name)} characters; at most {_MAX_NAME} are allowed.")
        if self._max_sessions is not None and len(self._open) >= self._max_sessions:
            raise ApiError(
                f"{self._max_sessions} sessions are open (--max-sessions). Delete one, or try again later.",
                status=503,
                code="too_many_sessions",
            )

    def _index(self, name: str, secret: str) -> bytes:
        return hmac.digest(self._hash_key, f"{len(name)} {name}{secret}".encode(), "sha256")


def _are_flags(options: Mapping[str, Any]) -> bool:
    """Whether all template options of a client are flags or short texts; others, such as numbers, may make rendering
    slow."""
    return all(
        value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= _SHORT_OPTION)
        for value in options.values()
    )


def _with_tool_names(messages: Sequence[Message], reply: Message) -> list[Message]:
    """The messages, with the tool names in tool results: some templates need them and clients do not send them."""
    names = {call["id"]: call["function"]["name"] for call in reply.get("tool_calls", ())}
    first = next(iter(names.values()), "tool")
    return [
        {"tool_call_id": "", "name": names.get(message.get("tool_call_id", ""), first), **message}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def _node_state(node: ResponseNode) -> dict[str, Any]:
    output = node.output
    return {
        "messages": node.request.messages,
        "reply": node.reply,
        "context_ids": node.request.context_ids,
        "token_ids": output.token_ids,
        "log_probs": output.log_probs,
        "versions": output.versions,
        "finish_reason": output.finish_reason,
    }
