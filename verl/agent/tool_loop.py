"""ToolAgentLoop: generate a turn, run its tool calls, append the results, repeat.

The loop ends with a turn without tool calls, when the simulated user ends the conversation, or at a limit. Replies of
tools and users are excluded from the loss (`AgentData.add_replies`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from verl.agent.chat import Chat, ChatSettings, encode_replies, tool_message
from verl.agent.chat_check import check_template
from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register_agent_loop
from verl.agent.toolbox import Toolbox, ToolSession
from verl.config import PPOConfig
from verl.interactions.base import InteractionSession
from verl.utils.tool_calls import Parser, ToolCall, get_parser

__all__ = ["AgentData", "ToolAgentLoop"]

logger = logging.getLogger(__name__)

Schemas = Sequence[Mapping[str, Any]]
Replies = list[dict[str, Any]]

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
# The message about calls that were not run lists this many tool names, each cut to this many characters.
_MAX_NAMES, _MAX_NAME_LENGTH = 8, 64


@register_agent_loop("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """`agent_name: tool_agent`, configured by `rollout.multi_turn.*`."""

    parser: ClassVar[Parser]
    chats: ClassVar[dict[str, Chat]]
    """Chats by the JSON of the tool schemas that a row may use."""
    end_token_ids: ClassVar[frozenset[int]] = frozenset()
    """Ids of the tokens at which the engine ends a turn."""

    @classmethod
    def init_class(
        cls,
        config: PPOConfig,
        tokenizer: Any,
        processor: Any,
        toolbox: Toolbox | None = None,
        end_token_ids: Iterable[int] = (),
        **own: Any,
    ) -> None:
        """Check the chat template with the tools."""
        cls.end_token_ids = frozenset(end_token_ids)
        cls.parser = get_parser(config.actor_rollout_ref.rollout.multi_turn.format)
        cls.chats = {}
        cls._chat(config, tokenizer, [] if toolbox is None else toolbox.schemas())

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.toolbox.session(row) as tools, self._interaction(row) as user:
            data = self._create_data(tools.schemas, sampling_params, row)
            while True:
                calls = await self._generate_turn(data, tools.schemas, sampling_params)
                if self._is_finished(data, can_continue=bool(calls) or user is not None):
                    break
                replies = await self._run_tools(calls, tools, data) if calls else await self._user_reply(user, data)
                if not replies or not data.add_replies(replies, await self._encode(data, tools.schemas, replies)):
                    break
            for reward in (await tools.calc_rewards()).values():
                data.add_reward(reward, data.tool_rewards)
            if user is not None:
                data.add_reward(await user.calculate_score(), data.turn_scores)
        return data.output(tools.failures, tools.statistics)

    def _create_data(self, schemas: Schemas, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> AgentData:
        chat = self._chat(self.config, self.tokenizer, schemas)
        messages = [dict(message) for message in row["raw_prompt"]]
        prompt_ids = chat.prompt_ids(messages)
        max_response = min(sampling_params["max_new_tokens"], self.rollout_config.max_model_len - len(prompt_ids))
        return AgentData(row, chat, messages, prompt_ids, max_response)

    async def _generate_turn(
        self, data: AgentData, schemas: Schemas, sampling_params: Mapping[str, Any]
    ) -> list[ToolCall]:
        """Append the model's next turn to `data`; return its tool calls."""
        output = await self.server_manager.generate(
            request_id=data.request_id,
            prompt_ids=data.prompt_ids + data.response_ids,
            sampling_params={**sampling_params, "max_new_tokens": max(1, data.remaining)},
        )
        text = data.add_model_turn(output.token_ids, output.extra_fields["finish_reason"])
        content, calls = self.parser.parse(text, schemas)
        data.messages.append(_assistant_message(text, content, calls))
        return calls

    def _is_finished(self, data: AgentData, can_continue: bool) -> bool:
        if data.finish_reason != "stop" or not can_continue:
            return True
        config = self.rollout_config.multi_turn
        limits = ((data.assistant_turns, config.max_assistant_turns), (data.user_turns, config.max_user_turns))
        limit_reached = any(limit is not None and turns >= limit for turns, limit in limits)
        data.failures["turn_limit"] += limit_reached
        return limit_reached

    async def _run_tools(self, calls: Sequence[ToolCall], tools: ToolSession, data: AgentData) -> Replies:
        """Run the calls concurrently and return the tools' messages. Calls beyond the limits are not run; a message
        to the model lists them."""
        config = self.rollout_config.multi_turn
        allowed = config.max_parallel_calls
        if config.max_tool_calls is not None:
            allowed = min(allowed, config.max_tool_calls - data.tool_calls)
        start = time.monotonic()
        results = await asyncio.gather(*(tools.call(call, agent_data=data) for call in calls[:allowed]))
        data.tool_seconds += time.monotonic() - start
        data.tool_calls += len(results)
        replies = [(call.name, result.text) for call, result in zip(calls, results, strict=False)]
        for result in results:
            data.add_reward(result.reward, data.tool_rewards)
        if skipped := [call.name[:_MAX_NAME_LENGTH] for call in calls[allowed:]]:
            data.failures["limit"] += len(skipped)
            more = f" and {len(skipped) - _MAX_NAMES} more" if len(skipped) > _MAX_NAMES else ""
            limit = f"at most {config.max_parallel_calls} in one turn"
            if config.max_tool_calls is not None:
                limit += f" and {config.max_tool_calls} in all"
            names = ", ".join(skipped[:_MAX_NAMES])
            replies.append((skipped[0], f"Not run: {names}{more}. Tool calls are limited to {limit}."))
        return [
            tool_message(name[:_MAX_NAME_LENGTH] or "unknown", text, number)
            for number, (name, text) in enumerate(replies)
        ]

    async def _encode(self, data: AgentData, schemas: Schemas, replies: Replies) -> list[int]:
        """Token ids of the replies; those beyond `data.remaining` may be inexact."""
        settings = ChatSettings.create(schemas, self.end_token_ids, self.config.data.apply_chat_template_kwargs)
        return await encode_replies(
            data.chat, settings, self.tokenizer, replies, data.response_ids, max_tokens=data.remaining
        )

    async def _user_reply(self, user: InteractionSession | None, data: AgentData) -> Replies:
        """The simulated user's message after a turn without tool calls; empty: the user ends the conversation."""
        assert user is not None
        done, text, score, _ = await user.respond(data.messages)
        data.add_reward(score, data.turn_scores)
        return [] if done else [{"role": "user", "content": text}]

    def _interaction(self, row: Mapping[str, Any]) -> AbstractAsyncContextManager[InteractionSession | None]:
        """The row's session with a simulated user; a context of None if the row has no simulated user."""
        return self.toolbox.interactions.session(row) or nullcontext()

    @classmethod
    def _chat(cls, config: PPOConfig, tokenizer: Any, schemas: Schemas) -> Chat:
        """The chat with these tools. The first call checks its template and logs warnings."""
        key = json.dumps(schemas, sort_keys=True)
        if key not in cls.chats:
            mode = config.actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode
            chat = Chat(tokenizer, schemas, cls.end_token_ids, **config.data.apply_chat_template_kwargs)
            for warning in (*check_template(chat, mode), *_config_warnings(chat, cls.parser, config, tokenizer)):
                logger.warning("Multi-turn chat: %s", warning)
            cls.chats[key] = chat  # only now: the check may raise
        return cls.chats[key]


def _config_warnings(chat: Chat, parser: Parser, config: PPOConfig, tokenizer: Any) -> Iterator[str]:
    """Warnings if `multi_turn.format` does not match the template, or the tool list makes prompts too long."""
    rollout = config.actor_rollout_ref.rollout
    text = chat.turns.rendered_call() if chat.has_tools else None
    if text is not None and chat.turns.tool_name not in {call.name for call in parser.parse(text)[1]}:
        yield (
            f"the chat template writes a tool call as {text!r}, in which {_MULTI_TURN}.format ="
            f" {rollout.multi_turn.format} finds no call."
        )
    prompt = [{"role": "user", "content": "?"}]
    without_tools = Chat(tokenizer, **config.data.apply_chat_template_kwargs)
    added = len(chat.prompt_ids(prompt)) - len(without_tools.prompt_ids(prompt))
    needed = config.data.max_prompt_length + added + rollout.max_new_tokens
    if needed > rollout.max_model_len:
        yield (
            f"the list of tools adds {added} tokens to every prompt, so the longest prompts leave fewer tokens for"
            f" responses. Set actor_rollout_ref.rollout.max_model_len={needed} to avoid this."
        )


@dataclass(slots=True)
class AgentData:
    """State of one trajectory while it is generated. Tools receive it as `agent_data`."""

    row: Mapping[str, Any]
    chat: Chat
    messages: list[dict[str, Any]]
    """The conversation as text."""
    prompt_ids: list[int]
    max_response: int
    """Limit of response tokens, including the environment's."""
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
    """Scores that the simulated user returned."""
    failures: Counter[str] = field(default_factory=Counter)
    finish_reason: str | None = None
    """Finish reason of the model's last turn; `length` if the replies to it did not fit."""
    _turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    _turn_names: list[str] = field(default_factory=list)
    _turn_end: int = 0

    @property
    def remaining(self) -> int:
        """The number of response tokens that can still be added."""
        return self.max_response - len(self.response_ids)

    def add_model_turn(self, token_ids: Sequence[int], finish_reason: str) -> str:
        """Append a turn of the model; return its text without the end token."""
        self._append(token_ids, mask=1)
        self.assistant_turns += 1
        self.finish_reason = finish_reason
        self._turn_end = len(self.response_ids)
        return self.chat.decode(self.chat.strip_end_token(token_ids))

    def add_replies(self, messages: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> bool:
        """Append messages of the environment, whose `chat.suffix` is `token_ids`.

        Their mask is 0, which excludes them from the loss: `agent/outputs.py` converts them to turns of the
        environment, and `workers/rollout/training_rows.py` builds `response_mask` from the turns.
        Returns False if they were truncated or leave no token for the model's next turn.
        """
        fits = len(token_ids) < self.remaining
        if not fits:
            self.finish_reason = "length"
            self.failures["length"] += 1
        self._append(token_ids[: self.remaining], mask=0)
        self.user_turns += 1
        self.messages += messages
        self._turn_names.append(", ".join(dict.fromkeys(message.get("name", "user") for message in messages)))
        return fits

    def add_reward(self, reward: float | None, rewards: list[float]) -> None:
        """Record a reward of the model's last turn, also in the list `rewards` (of tools or of the user)."""
        if reward is not None:
            rewards.append(reward)
            self._turn_rewards.append((self._turn_end, reward))

    def output(self, tool_failures: Mapping[str, int], tools: Mapping[str, dict[str, float]]) -> AgentLoopOutput:
        """The output of the loop. Log-probs and versions are added from the EngineClient's trace."""
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
            messages=self._messages_to_last_response(),
        )

    def _messages_to_last_response(self) -> list[dict[str, Any]]:
        """The conversation without replies after the model's last response."""
        last = max(index for index, message in enumerate(self.messages) if message["role"] == "assistant")
        return self.messages[: last + 1]

    def _append(self, token_ids: Sequence[int], mask: int) -> None:
        self.response_ids += token_ids
        self.response_mask += [mask] * len(token_ids)


def _assistant_message(text: str, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The message of a turn. `text`: the whole turn; `content`: the part without tool calls.

    A turn with a malformed call becomes a message without tool calls, with the whole text.
    """
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": text if calls else content}
    tool_calls = [
        {
            "id": tool_message("", "", number)["tool_call_id"],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}
