"""Tree: what a session was asked and what the model said, token for token, with its branches and retries. No I/O.

A node is one answer. Its parent is the node whose messages and answer its own request repeats exactly and goes on from:
their tokens are taken over as they are. A request that repeats nothing exactly begins a tree of its own.
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

__all__ = ["Lookup", "Message", "Node", "Path", "Place", "Tree", "digests_of", "scope_of"]

Message = dict[str, Any]
_CONTEXT_TOKEN_BYTES = 36
_SAMPLED_TOKEN_BYTES = 160
_ENTRY_BYTES = 1024


@dataclass(frozen=True, eq=False)
class Place:
    """Where in the tree an answer goes. A request that is sent again has the same one."""

    parent: Node | None
    messages: list[Message]
    """Those that came after the parent's answer; all of them where there is no parent."""
    context_ids: list[int]
    """Their tokens, up to where the answer begins."""
    scope: str
    """What the context was written with besides messages: tools, options of the template."""

    @property
    def prompt_ids(self) -> list[int]:
        """The whole context."""
        ids: list[int] = []
        for node in () if self.parent is None else self.parent.path:
            ids += node.place.context_ids + node.answer.token_ids
        return ids + self.context_ids

    @property
    def conversation(self) -> list[Message]:
        """The messages of the whole context, the answers between them included."""
        said: list[Message] = []
        for node in () if self.parent is None else self.parent.path:
            said += [*node.place.messages, node.reply]
        return said + self.messages


@dataclass(frozen=True, eq=False)
class Node:
    """One answer of the model."""

    place: Place
    answer: Output
    reply: Message
    """The answer as the client was told, in canonical form."""
    order: tuple[int, int] = (0, 0)
    """The number of answers in the session when this one was requested, and when it finished."""

    @property
    def path(self) -> list[Node]:
        """From the first answer of this context to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.place.parent
        return found[::-1]


@dataclass(frozen=True)
class Path:
    """Answers that stand in one context, first to last: a row of the trajectory."""

    nodes: list[Node]
    trained: list[bool]
    """Per node. Answers that several paths begin with are trained in the first one; in the others they are context."""


@dataclass(frozen=True)
class Lookup:
    """The result of `Tree.lookup`."""

    asked: str
    place: Place | None
    """The place of the same request that was sent before."""
    parent: Node | None
    """The node that the messages continue. None: they start a context."""
    messages: list[Message]
    """The messages to tokenise: those after the parent's answer, or all."""


@dataclass
class Tree:
    """One session's nodes, in the order in which the model finished them."""

    nodes: list[Node] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Requests: start, extension, retry, branch."""
    stored_bytes: int = 0
    """Memory of all messages and tokens, estimated."""
    _asked: dict[str, Place] = field(default_factory=dict)
    _told: dict[str, Node] = field(default_factory=dict)

    def lookup(self, messages: Sequence[Message], digests: Sequence[str], begun: str) -> Lookup:
        """Where the answer to these messages goes: a known place, or the node that they continue.

        `digests`: `digests_of` the messages. `begun`: how the answer must begin.
        """
        asked = f"{digests[-1]} {begun}"
        known = self._asked.get(asked)
        if known is not None:
            self.counts["retry"] += 1
            return Lookup(asked, known, known.parent, known.messages)
        parent, new = self._extended(messages, digests)
        return Lookup(asked, None, parent, list(messages) if parent is None else new)

    def open_place(self, lookup: Lookup, context_ids: list[int], scope: str) -> Place:
        """The place of a lookup that knew none; `context_ids` are the tokens of its messages."""
        place = Place(lookup.parent, lookup.messages, context_ids, scope)
        kind = "extension" if lookup.parent is not None else "branch" if self._asked else "start"
        self._asked[lookup.asked] = place
        self.stored_bytes += _memory([lookup.messages, scope]) + _CONTEXT_TOKEN_BYTES * len(context_ids)
        self.counts[kind] += 1
        return place

    def add(self, place: Place, answer: Output, reply: Message, requested_at: int | None = None) -> Node:
        """Add an answer that the client received whole; `requested_at`: `len(nodes)` at its request (None: now)."""
        finished_at = len(self.nodes)
        node = Node(place, answer, reply, (finished_at if requested_at is None else requested_at, finished_at))
        self.nodes.append(node)
        top = sum(map(len, answer.top_log_probs))
        self.stored_bytes += _memory(reply) + _SAMPLED_TOKEN_BYTES * (len(answer.token_ids) + top)
        self._told[digests_of(place.scope, [*place.conversation, reply])[-1]] = node
        return node

    def paths(self, keep_retries: bool) -> list[Path]:
        """Every path from a first answer to a last one that counts; no answer is trained twice.

        A last answer is discarded if the client later requested, or continued from, another answer to the same
        request: it did not earn the reward. With `keep_retries`, for agents that request several answers on purpose,
        it counts.
        """
        parents = {id(node.place.parent) for node in self.nodes}
        discarded = set() if keep_retries else self._discarded()
        seen: set[int] = set()
        found = []
        for node in self.nodes:
            if id(node) in parents or id(node) in discarded:
                continue
            path = node.path
            found.append(Path(path, [id(each) not in seen for each in path]))
            seen.update(map(id, path))
        return found

    def _discarded(self) -> set[int]:
        """`id()` of answers after which the client requested, or continued from, another answer to the same request."""
        latest: dict[int, tuple[int, int]] = {}
        """By `id()` of an answer: the latest `order` among itself and all answers that continue from it."""
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

    def _extended(self, messages: Sequence[Message], digests: Sequence[str]) -> tuple[Node | None, list[Message]]:
        """The node that the messages go on from, and the new ones.

        Where answers that the model never gave come after it, none: a template may write earlier answers differently
        from the last one, so that its own wording of the whole is the only right one.
        """
        for length in range(len(messages) - 1, 0, -1):
            if messages[length]["role"] == "assistant":
                break
            node = self._told.get(digests[length])
            if node is not None:
                return node, list(messages[length:])
        return None, []


def scope_of(tools: Any, options: Any) -> str:
    """What a context is written with besides its messages: tools, options of the template."""
    return json.dumps([tools, options], sort_keys=True, ensure_ascii=False)


def digests_of(scope: str, messages: Sequence[Message]) -> list[str]:
    """One per number of messages, from none to all of them: equal where those are equal in canonical form."""
    digest = hashlib.blake2b(scope.encode(), digest_size=16)
    digests = [digest.hexdigest()]
    for message in messages:
        digest.update(_canonical(message).encode())
        digests.append(digest.hexdigest())
    return digests


def _memory(value: Any) -> int:
    """Bytes of nested dicts, lists and texts, and of one entry of the tree."""
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
    """What the message says. Ids of calls are our invention, and clients may spell a call's arguments anew."""
    said = {name: value for name, value in message.items() if value not in (None, "", []) and name != "tool_call_id"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if calls:
        said["tool_calls"] = [[call["name"], _read(call.get("arguments"))] for call in calls]
    return json.dumps(said, sort_keys=True, ensure_ascii=False) + "\n"


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
