"""AgentData: a trajectory with tools while it comes about: whose tokens are whose, what turns earned, what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from verl.agent.chat import Chat, tool_message
from verl.agent.loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tool_calls import ToolCall

__all__ = ["AgentData", "answer_message"]


def answer_message(text: str, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The assistant message of a turn: `text` is the whole turn, `content` the part without tool calls.

    A turn with a malformed call is returned as text only.
    """
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": text if calls else content}
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    ids = [tool_message("", "", number)["tool_call_id"] for number in range(len(calls))]
    pairs = zip(ids, functions, strict=True)
    tool_calls = [{"id": call_id, "type": "function", "function": function} for call_id, function in pairs]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


@dataclass(slots=True)
class AgentData:
    """Tools get it as `agent_data`."""

    row: Mapping[str, Any]
    chat: Chat
    messages: list[dict[str, Any]]
    """The conversation as text."""
    prompt_ids: list[int]
    room: int
    """Response tokens that it may have, whoever's they are."""
    request_id: str = field(default_factory=lambda: uuid4().hex)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0
    """Turns of tools and of simulated users."""
    tool_calls: int = 0
    tool_seconds: float = 0.0
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    """What a simulated user thought of turns."""
    failures: Counter[str] = field(default_factory=Counter)
    finish_reason: str | None = None
    """Of the model's last turn; length, where what was said to it did not fit."""
    _turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    _turn_names: list[str] = field(default_factory=list)
    _turn_end: int = 0

    @property
    def left(self) -> int:
        """Response tokens that there is still room for."""
        return self.room - len(self.response_ids)

    def hear(self, token_ids: Sequence[int], finish_reason: str) -> str:
        """Take the model's turn; its text without the token that ended it."""
        self._append(token_ids, mask=1)
        self.assistant_turns += 1
        self.finish_reason = finish_reason
        self._turn_end = len(self.response_ids)
        return self.chat.decode(self.chat.content(token_ids))

    def reply(self, messages: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> bool:
        """Append what is said to the model, `chat.suffix` of which is `token_ids`.

        False: it was cut, and the model has no room to go on.
        """
        fits = len(token_ids) < self.left
        if not fits:
            self.finish_reason = "length"
            self.failures["length"] += 1
        self._append(token_ids[: self.left], mask=0)
        self.user_turns += 1
        self.messages += messages
        self._turn_names.append(", ".join(dict.fromkeys(message.get("name", "user") for message in messages)))
        return fits

    def earn(self, reward: float | None, kept: list[float]) -> None:
        """A reward for the model's last turn; `kept` is where rewards of its kind are told."""
        if reward is not None:
            kept.append(reward)
            self._turn_rewards.append((self._turn_end, reward))

    def output(self, tool_failures: Mapping[str, int], tools: Mapping[str, dict[str, float]]) -> AgentLoopOutput:
        """The whole of it; log-probs and versions are in the server's record."""
        return AgentLoopOutput(
            self.prompt_ids,
            self.response_ids,
            self.response_mask,
            num_turns=1 + self.user_turns + self.assistant_turns,
            metrics=AgentLoopMetrics(
                tool_calls=self.tool_seconds,
                tool_call_counts=self.tool_calls,
                failures=dict(self.failures + Counter(tool_failures)),
                tools=dict(tools),
            ),
            extra_fields={
                "tool_rewards": self.tool_rewards,
                "turn_scores": self.turn_scores,
                "turn_names": self._turn_names,
            },
            turn_rewards=self._turn_rewards,
            finish_reason=self.finish_reason,
            messages=self._up_to_last_answer(),
        )

    def _up_to_last_answer(self) -> list[dict[str, Any]]:
        """The conversation without replies that the model did not answer."""
        last = max(index for index, message in enumerate(self.messages) if message["role"] == "assistant")
        return self.messages[: last + 1]

    def _append(self, token_ids: Sequence[int], mask: int) -> None:
        self.response_ids += token_ids
        self.response_mask += [mask] * len(token_ids)
