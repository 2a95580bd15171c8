"""ToolAgentLoop: the model answers, its tool calls are run, what they say is appended, and it goes on.

It ends with an answer without calls, when a simulated user is content, or at a limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, ClassVar

from verl.agent.agent_data import AgentData, answer_message
from verl.agent.chat import Chat, tool_message
from verl.agent.chat_writer import ChatWriter
from verl.agent.loop import AgentLoopBase, AgentLoopOutput, register_agent_loop
from verl.agent.reply_tokens import reply_tokens
from verl.agent.toolbox import Toolbox, ToolSession
from verl.config import PPOConfig
from verl.interactions.box import InteractionSession
from verl.utils.tool_calls import Parser, ToolCall, get_parser

__all__ = ["ToolAgentLoop"]

logger = logging.getLogger(__name__)

Schemas = Sequence[Mapping[str, Any]]
Replies = list[dict[str, Any]]

_TURNS = "actor_rollout_ref.rollout.multi_turn"
# So many names of calls that were not run are told to the model, and so much of each.
_NAMED, _NAME = 8, 64


@register_agent_loop("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """`agent_name: tool_agent`; its keys are `rollout.multi_turn.*`."""

    parser: ClassVar[Parser]
    chats: ClassVar[dict[str, Chat]]
    """By the tools that a row may use."""
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
        async with self.toolbox.session(row) as tools, self._user(row) as user:
            data = self._begin(tools.schemas, sampling_params, row)
            while True:
                calls = await self._answer(data, tools.schemas, sampling_params)
                if self._over(data, may_go_on=bool(calls) or user is not None):
                    break
                replies = await self._call(calls, tools, data) if calls else await self._ask(user, data)
                if not replies or not data.reply(replies, await self._tokens(data, tools.schemas, replies)):
                    break
            for reward in (await tools.finish()).values():
                data.earn(reward, data.tool_rewards)
            if user is not None:
                data.earn(await user.finish(), data.turn_scores)
        return data.output(tools.failures, tools.statistics)

    def _begin(self, schemas: Schemas, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> AgentData:
        chat = self._chat(self.config, self.tokenizer, schemas)
        messages = [dict(message) for message in row["raw_prompt"]]
        prompt_ids = chat.start(messages)
        room = min(sampling_params["max_new_tokens"], self.rollout_config.max_model_len - len(prompt_ids))
        return AgentData(row, chat, messages, prompt_ids, room)

    async def _answer(self, data: AgentData, schemas: Schemas, sampling_params: Mapping[str, Any]) -> list[ToolCall]:
        """The model's turn, and the calls in it."""
        answer = await self.server_manager.generate(
            request_id=data.request_id,
            prompt_ids=data.prompt_ids + data.response_ids,
            sampling_params={**sampling_params, "max_new_tokens": max(1, data.left)},
        )
        text = data.hear(answer.token_ids, answer.extra_fields["finish_reason"])
        content, calls = self.parser.parse(text, schemas)
        data.messages.append(answer_message(text, content, calls))
        return calls

    def _over(self, data: AgentData, may_go_on: bool) -> bool:
        if data.finish_reason != "stop" or not may_go_on:
            return True
        turns = self.rollout_config.multi_turn
        taken = ((data.assistant_turns, turns.max_assistant_turns), (data.user_turns, turns.max_user_turns))
        full = any(most is not None and count >= most for count, most in taken)
        data.failures["turn_limit"] += full
        return full

    async def _call(self, calls: Sequence[ToolCall], tools: ToolSession, data: AgentData) -> Replies:
        """What the tools say, run side by side; what is beyond the limits is not run, and the model is told so."""
        turns = self.rollout_config.multi_turn
        most = turns.max_parallel_calls
        if turns.max_tool_calls is not None:
            most = min(most, turns.max_tool_calls - data.tool_calls)
        begun = time.monotonic()
        results = await asyncio.gather(*(tools.call(call, agent_data=data) for call in calls[:most]))
        data.tool_seconds += time.monotonic() - begun
        data.tool_calls += len(results)
        told = [(call.name, result.text) for call, result in zip(calls, results, strict=False)]
        for result in results:
            data.earn(result.reward, data.tool_rewards)
        if rest := [call.name[:_NAME] for call in calls[most:]]:
            data.failures["limit"] += len(rest)
            more = f" and {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
            limit = f"at most {turns.max_parallel_calls} in one turn"
            if turns.max_tool_calls is not None:
                limit += f" and {turns.max_tool_calls} in all"
            told.append((rest[0], f"Not run: {', '.join(rest[:_NAMED])}{more}. Tool calls are limited to {limit}."))
        return [tool_message(name[:_NAME] or "unknown", text, number) for number, (name, text) in enumerate(told)]

    async def _tokens(self, data: AgentData, schemas: Schemas, replies: Replies) -> list[int]:
        """The tokens of what is said to the model; those without room need not be right."""
        writer = ChatWriter.of(schemas, self.end_token_ids, self.config.data.apply_chat_template_kwargs)
        return await reply_tokens(data.chat, writer, self.tokenizer, replies, data.response_ids, data.left)

    async def _ask(self, user: InteractionSession | None, data: AgentData) -> Replies:
        """What the simulated user says to an answer without calls; nothing when they are content."""
        assert user is not None
        done, text, score, _ = await user.respond(data.messages)
        data.earn(score, data.turn_scores)
        return [] if done else [{"role": "user", "content": text}]

    def _user(self, row: Mapping[str, Any]) -> AbstractAsyncContextManager[InteractionSession | None]:
        """The simulated user of a row that has one."""
        return self.toolbox.interactions.session(row) or nullcontext()

    @classmethod
    def _chat(cls, config: PPOConfig, tokenizer: Any, schemas: Schemas) -> Chat:
        """The chat with these tools; what is worth knowing of its template is said when it is first asked for."""
        key = json.dumps(schemas, sort_keys=True)
        if key not in cls.chats:
            mode = config.actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode
            chat = cls.chats[key] = Chat(
                tokenizer, schemas, cls.end_token_ids, **config.data.apply_chat_template_kwargs
            )
            for finding in (*chat.check(mode), *_doubts(chat, cls.parser, config, tokenizer)):
                logger.warning("Turns: %s", finding)
        return cls.chats[key]


def _doubts(chat: Chat, parser: Parser, config: PPOConfig, tokenizer: Any) -> Iterator[str]:
    """What may be wrong with the keys, given how the template writes tools."""
    rollout = config.actor_rollout_ref.rollout
    call = chat.written_call() if chat.has_tools else None
    if call is not None and chat.tool_name not in {found.name for found in parser.parse(call)[1]}:
        form = rollout.multi_turn.format
        yield f"the chat template writes a tool call as {call!r}. {_TURNS}.format = {form} reads none in that."
    hello = [{"role": "user", "content": "?"}]
    listed = len(chat.start(hello)) - len(Chat(tokenizer, **config.data.apply_chat_template_kwargs).start(hello))
    wanted = config.data.max_prompt_length + listed + rollout.max_new_tokens
    if wanted > rollout.max_model_len:
        yield (
            f"the list of tools adds {listed} tokens to every prompt, so that the longest ones leave less room for"
            f" answers. actor_rollout_ref.rollout.max_model_len={wanted} holds all of it."
        )
