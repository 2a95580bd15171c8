"""Tree: what a session was asked and what the model said, token for token, with its branches and retries. No I/O.

A node is one answer. Its parent is the node whose messages and answer its own request repeats exactly and goes on from:
their tokens are taken over as they are. A request that repeats nothing exactly begins a tree of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.types.request import Output

__all__ = ["Message", "Node", "Path", "Place", "Tree"]

Message = dict[str, Any]


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


@dataclass
class Tree:
    """One session's nodes, in the order in which the model finished them."""

    nodes: list[Node] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Requests: start, extension, retry, branch."""
    _asked: dict[str, Place] = field(default_factory=dict)
    _told: dict[str, Node] = field(default_factory=dict)

    def place(
        self,
        messages: Sequence[Message],
        scope: str,
        begun: str,
        start: Callable[[], list[int]],
        suffix: Callable[[Sequence[Message], Node], list[int]],
    ) -> Place:
        """Where the answer to these messages goes.

        `start` tokenises all of them, `suffix` those that come after a node; `begun` is how the answer must begin.
        """
        digests = list(_digests(scope, messages))
        asked = f"{digests[-1]} {begun}"
        found = self._asked.get(asked)
        if found is not None:
            self.counts["retry"] += 1
            return found
        parent, new = self._extended(messages, digests)
        if parent is not None:
            place = Place(parent, new, suffix(new, parent), scope)
            kind = "extension"
        else:
            place = Place(None, list(messages), start(), scope)
            kind = "branch" if self._asked else "start"
        self._asked[asked] = place
        self.counts[kind] += 1
        return place

    def add(self, place: Place, answer: Output, reply: Message, requested_at: int | None = None) -> Node:
        """Add an answer that the client received whole; `requested_at`: `len(nodes)` at its request (None: now)."""
        finished_at = len(self.nodes)
        node = Node(place, answer, reply, (finished_at if requested_at is None else requested_at, finished_at))
        self.nodes.append(node)
        *_, told = _digests(place.scope, [*place.conversation, reply])
        self._told[told] = node
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

    def _extended(self, messages: Sequence[Message], digests: list[str]) -> tuple[Node | None, list[Message]]:
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


def _digests(scope: str, messages: Sequence[Message]) -> Iterator[str]:
    """One per number of messages, from none to all of them: equal where those are equal in canonical form."""
    digest = hashlib.blake2b(scope.encode(), digest_size=16)
    yield digest.hexdigest()
    for message in messages:
        digest.update(_canonical(message).encode())
        yield digest.hexdigest()


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
