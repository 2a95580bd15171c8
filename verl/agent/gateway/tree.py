"""Tree: the requests and responses of a session as tokens, with branches and retries. No I/O.

A request is the child of the response that it continues: its messages repeat the conversation up to that response
exactly, so their tokens are reused. A request that continues no response is a root. A response is a child of its
request; a request that was sent several times has several responses.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.types.request import Output

__all__ = ["Lookup", "Message", "Path", "RequestNode", "ResponseNode", "Tree", "prefix_digests", "scope_key"]

Message = dict[str, Any]
# Estimated memory of a context token: its id as a Python int, and the pointer in a list.
_CONTEXT_TOKEN_BYTES = 36
# Estimated memory of a sampled token: its id, log-probs and version, and the pointers in their lists.
_SAMPLED_TOKEN_BYTES = 160
# Estimated memory of a request or a response besides messages and tokens: its objects, digests and dict entries.
_ENTRY_BYTES = 1024


@dataclass(frozen=True, eq=False)
class RequestNode:
    """A request in the tree. A repeated request has the same node."""

    parent: ResponseNode | None
    """The response that it continues; None: it is a root."""
    messages: list[Message]
    """The messages after the parent's response; without a parent, all messages."""
    context_ids: list[int]
    """Token ids of `messages`, with the generation prompt."""
    scope: str
    """See `scope_key`."""

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the whole context."""
        ids: list[int] = []
        for node in () if self.parent is None else self.parent.path:
            ids += node.request.context_ids + node.output.token_ids
        return ids + self.context_ids

    @property
    def conversation(self) -> list[Message]:
        """The messages of the whole context, including responses."""
        messages: list[Message] = []
        for node in () if self.parent is None else self.parent.path:
            messages += [*node.request.messages, node.reply]
        return messages + self.messages


@dataclass(frozen=True, eq=False)
class ResponseNode:
    """One response of the model."""

    request: RequestNode
    output: Output
    """The sampled tokens."""
    reply: Message
    """The message that the client received."""
    order: tuple[int, int] = (0, 0)
    """(number of responses of the session when this one was requested, and when it finished)."""

    @property
    def path(self) -> list[ResponseNode]:
        """The responses from the root to this one."""
        nodes: list[ResponseNode] = []
        node: ResponseNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.request.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Path:
    """Responses in one context, from root to leaf: a row of the trajectory."""

    nodes: list[ResponseNode]
    trained: list[bool]
    """Per node: whether its tokens are trained. A response shared by several paths is trained only in the first one."""


@dataclass(frozen=True)
class Lookup:
    """The result of `Tree.lookup`."""

    request_key: str
    request: RequestNode | None
    """The node of an earlier, equal request."""
    parent: ResponseNode | None
    """The response that the messages continue; None: the request is a root."""
    messages: list[Message]
    """The messages to tokenise: those after the parent's response, or all."""


@dataclass
class Tree:
    """The requests and responses of a session."""

    nodes: list[ResponseNode] = field(default_factory=list)
    """The responses, in the order in which they finished."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of requests by kind: start, extension, retry, branch."""
    stored_bytes: int = 0
    """Estimated memory of all messages and tokens."""
    _requests: dict[str, RequestNode] = field(default_factory=dict)
    _nodes_by_digest: dict[str, ResponseNode] = field(default_factory=dict)

    def lookup(self, messages: Sequence[Message], digests: Sequence[str], forced_prefix: str) -> Lookup:
        """Find the node of an equal earlier request, or the response that these messages continue.

        `digests`: `prefix_digests` of the messages. `forced_prefix`: the forced beginning of the response.
        """
        request_key = f"{digests[-1]} {forced_prefix}"
        earlier = self._requests.get(request_key)
        if earlier is not None:
            self.counts["retry"] += 1
            return Lookup(request_key, earlier, earlier.parent, earlier.messages)
        parent, new_messages = self._find_parent(messages, digests)
        return Lookup(request_key, None, parent, new_messages)

    def add_request(self, lookup: Lookup, context_ids: list[int], scope: str) -> RequestNode:
        """Add the request of a `lookup` without an earlier one; `context_ids`: token ids of its messages."""
        request = RequestNode(lookup.parent, lookup.messages, context_ids, scope)
        kind = "extension" if lookup.parent is not None else "branch" if self._requests else "start"
        self._requests[lookup.request_key] = request
        self.stored_bytes += _memory([lookup.messages, scope]) + _CONTEXT_TOKEN_BYTES * len(context_ids)
        self.counts[kind] += 1
        return request

    def add_response(
        self, request: RequestNode, output: Output, reply: Message, requested_at: int | None = None
    ) -> ResponseNode:
        """Add a finished response. `requested_at`: `len(nodes)` when it was requested (None: now)."""
        finished_at = len(self.nodes)
        node = ResponseNode(
            request, output, reply, (finished_at if requested_at is None else requested_at, finished_at)
        )
        self.nodes.append(node)
        num_top_log_probs = sum(map(len, output.top_log_probs))
        self.stored_bytes += _memory(reply) + _SAMPLED_TOKEN_BYTES * (len(output.token_ids) + num_top_log_probs)
        self._nodes_by_digest[prefix_digests(request.scope, [*request.conversation, reply])[-1]] = node
        return node

    def paths(self, keep_retries: bool) -> list[Path]:
        """The paths from roots to leaves; no response is trained twice.

        A leaf is a response after which no other response was generated. It is discarded if the client later requested,
        or continued from, another response to the same request: the agent did not use this response, so the reward does
        not depend on it. `keep_retries` keeps such leaves, for agents that request several responses on purpose.
        """
        parents = {id(node.request.parent) for node in self.nodes}
        discarded = set() if keep_retries else self._discarded()
        seen: set[int] = set()
        paths = []
        for node in self.nodes:
            if id(node) in parents or id(node) in discarded:
                continue
            path = node.path
            paths.append(Path(path, [id(ancestor) not in seen for ancestor in path]))
            seen.update(map(id, path))
        return paths

    def _discarded(self) -> set[int]:
        """`id()` of the responses that the agent did not use.

        After such a response, the client requested another one to the same request, or continued from another one.
        """
        latest: dict[int, tuple[int, int]] = {}
        """By `id()` of a node: the latest `order` of itself and its descendants."""
        siblings: dict[int, list[ResponseNode]] = defaultdict(list)
        """By `id()` of a request: its responses."""
        for node in self.nodes:
            siblings[id(node.request)].append(node)
            for ancestor in node.path:
                latest[id(ancestor)] = max(latest.get(id(ancestor), node.order), node.order)
        return {
            id(node)
            for nodes in siblings.values()
            for node in nodes
            if any(latest[id(other)] > node.order for other in nodes if other is not node)
        }

    def _find_parent(
        self, messages: Sequence[Message], digests: Sequence[str]
    ) -> tuple[ResponseNode | None, list[Message]]:
        """Return the response that the messages continue, and the messages after it; else None and all messages.

        Messages do not continue a response if they contain another assistant message after it, which the model did not
        generate: a template may render earlier responses differently from the last one, so the whole conversation must
        be rendered.
        """
        for length in range(len(messages) - 1, 0, -1):
            if messages[length]["role"] == "assistant":
                break
            node = self._nodes_by_digest.get(digests[length])
            if node is not None:
                return node, list(messages[length:])
        return None, list(messages)


def scope_key(tools: Any, options: Any) -> str:
    """The inputs of the chat template besides messages (tools and options), as JSON."""
    return json.dumps([tools, options], sort_keys=True, ensure_ascii=False)


def prefix_digests(scope: str, messages: Sequence[Message]) -> list[str]:
    """Hashes of the scope with the first 0, 1, … all messages in canonical form: [number of messages + 1].

    Equal hashes mean that a response to one conversation can be continued by the other one.
    """
    digest = hashlib.blake2b(scope.encode(), digest_size=16)
    digests = [digest.hexdigest()]
    for message in messages:
        digest.update(_canonical(message).encode())
        digests.append(digest.hexdigest())
    return digests


def _memory(value: Any) -> int:
    """Estimated bytes of a node with this value (nested dicts, lists and texts)."""
    total, remaining = _ENTRY_BYTES, [value]
    while remaining:
        item = remaining.pop()
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            remaining.extend(item.values())
        elif isinstance(item, list):
            remaining.extend(item)
    return total


def _canonical(message: Message) -> str:
    """The message as JSON, without call ids, which the gateway generates, and with parsed arguments, which clients may
    reformat."""
    fields = {name: value for name, value in message.items() if value not in (None, "", []) and name != "tool_call_id"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if calls:
        fields["tool_calls"] = [[call["name"], _parse_arguments(call.get("arguments"))] for call in calls]
    return json.dumps(fields, sort_keys=True, ensure_ascii=False) + "\n"


def _parse_arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
