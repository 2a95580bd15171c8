"""Tree: the requests and responses of a session as tokens, with branches and retries. No I/O.

A node is one response. Its parent is the node whose messages and response its request repeats exactly and continues:
their tokens are reused. A request that continues no node starts a new root.
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

__all__ = ["Lookup", "Message", "Node", "Path", "Place", "Tree", "prefix_digests", "scope_key"]

Message = dict[str, Any]
_CONTEXT_TOKEN_BYTES = 36
_SAMPLED_TOKEN_BYTES = 160
_ENTRY_BYTES = 1024


@dataclass(frozen=True, eq=False)
class Place:
    """The position of a request in the tree. A repeated request has the same place."""

    parent: Node | None
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
            ids += node.place.context_ids + node.answer.token_ids
        return ids + self.context_ids

    @property
    def conversation(self) -> list[Message]:
        """The messages of the whole context, including responses."""
        messages: list[Message] = []
        for node in () if self.parent is None else self.parent.path:
            messages += [*node.place.messages, node.reply]
        return messages + self.messages


@dataclass(frozen=True, eq=False)
class Node:
    """One response of the model."""

    place: Place
    answer: Output
    reply: Message
    """The message that the client received."""
    order: tuple[int, int] = (0, 0)
    """The number of responses in the session when this one was requested, and when it finished."""

    @property
    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.place.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Path:
    """Responses in one context, from root to leaf: a row of the trajectory."""

    nodes: list[Node]
    trained: list[bool]
    """Per node: a response that several paths share is trained in the first path and is context in the others."""


@dataclass(frozen=True)
class Lookup:
    """The result of `Tree.lookup`."""

    request_key: str
    place: Place | None
    """The place of an earlier, equal request."""
    parent: Node | None
    """The node that the messages continue; None: they start a new root."""
    messages: list[Message]
    """The messages to tokenise: those after the parent's response, or all."""


@dataclass
class Tree:
    """The nodes of a session, in the order in which they finished."""

    nodes: list[Node] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Number of requests by kind: start, extension, retry, branch."""
    stored_bytes: int = 0
    """Estimated memory of all messages and tokens."""
    _places: dict[str, Place] = field(default_factory=dict)
    _nodes_by_digest: dict[str, Node] = field(default_factory=dict)

    def lookup(self, messages: Sequence[Message], digests: Sequence[str], forced_prefix: str) -> Lookup:
        """Find the place of an equal earlier request, or the node that these messages continue.

        `digests`: `prefix_digests` of the messages. `forced_prefix`: the forced beginning of the response.
        """
        request_key = f"{digests[-1]} {forced_prefix}"
        known = self._places.get(request_key)
        if known is not None:
            self.counts["retry"] += 1
            return Lookup(request_key, known, known.parent, known.messages)
        parent, new = self._find_parent(messages, digests)
        return Lookup(request_key, None, parent, list(messages) if parent is None else new)

    def open_place(self, lookup: Lookup, context_ids: list[int], scope: str) -> Place:
        """Add the place of a lookup that found none; `context_ids`: token ids of its messages."""
        place = Place(lookup.parent, lookup.messages, context_ids, scope)
        kind = "extension" if lookup.parent is not None else "branch" if self._places else "start"
        self._places[lookup.request_key] = place
        self.stored_bytes += _memory([lookup.messages, scope]) + _CONTEXT_TOKEN_BYTES * len(context_ids)
        self.counts[kind] += 1
        return place

    def add(self, place: Place, answer: Output, reply: Message, requested_at: int | None = None) -> Node:
        """Add a finished response. `requested_at`: `len(nodes)` when it was requested (None: now)."""
        finished_at = len(self.nodes)
        node = Node(place, answer, reply, (finished_at if requested_at is None else requested_at, finished_at))
        self.nodes.append(node)
        top = sum(map(len, answer.top_log_probs))
        self.stored_bytes += _memory(reply) + _SAMPLED_TOKEN_BYTES * (len(answer.token_ids) + top)
        self._nodes_by_digest[prefix_digests(place.scope, [*place.conversation, reply])[-1]] = node
        return node

    def paths(self, keep_retries: bool) -> list[Path]:
        """The paths from roots to leaves; no response is trained twice.

        A leaf is discarded if the client later requested, or continued from, another response to the same request: the
        reward does not depend on it. `keep_retries` keeps it, for agents that request several responses on purpose.
        """
        parents = {id(node.place.parent) for node in self.nodes}
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
        """`id()` of responses after which the client requested, or continued from, another one to the same request."""
        latest: dict[int, tuple[int, int]] = {}
        """By `id()` of a node: the latest `order` of itself and its descendants."""
        siblings: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            siblings[id(node.place)].append(node)
            for ancestor in node.path:
                latest[id(ancestor)] = max(latest.get(id(ancestor), node.order), node.order)
        return {
            id(node)
            for nodes in siblings.values()
            for node in nodes
            if any(latest[id(other)] > node.order for other in nodes if other is not node)
        }

    def _find_parent(self, messages: Sequence[Message], digests: Sequence[str]) -> tuple[Node | None, list[Message]]:
        """The node that the messages continue, and the messages after it.

        None if the messages after it include an assistant message that the model did not generate: a template may
        render earlier responses differently from the last one, so the whole conversation must be rendered.
        """
        for length in range(len(messages) - 1, 0, -1):
            if messages[length]["role"] == "assistant":
                break
            node = self._nodes_by_digest.get(digests[length])
            if node is not None:
                return node, list(messages[length:])
        return None, []


def scope_key(tools: Any, options: Any) -> str:
    """The inputs of the chat template besides messages (tools and options), as JSON."""
    return json.dumps([tools, options], sort_keys=True, ensure_ascii=False)


def prefix_digests(scope: str, messages: Sequence[Message]) -> list[str]:
    """Hashes of all prefixes of the messages, from none to all, in canonical form."""
    digest = hashlib.blake2b(scope.encode(), digest_size=16)
    digests = [digest.hexdigest()]
    for message in messages:
        digest.update(_canonical(message).encode())
        digests.append(digest.hexdigest())
    return digests


def _memory(value: Any) -> int:
    """Estimated bytes of nested dicts, lists and texts, and of one entry of the tree."""
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
    """The message without call ids, which the gateway generates, and with parsed arguments, which clients may
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
