"""check_template: compare the tokens that a Chat appends turn by turn with those of the chat template applied to whole
conversations, before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.agent.chat import Chat
from verl.utils.turn_template import FIRST, Message, Messages, closing_tokens, common_length, tool_message

__all__ = ["check_template"]

# The configuration key whose value is the `mode` of `check_template`.
_CHECK_KEY = "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode"
# In an error message, the number of characters shown of each text, from its end.
_MAX_SHOWN_CHARS = 200
_USER_MESSAGE: Message = {"role": "user", "content": "Go on."}


def check_template(chat: Chat, mode: str) -> list[str]:
    """Return warnings about the chat template: missing features, and changes that it makes to earlier turns.

    Conversations are simulated turn by turn: once for each end token, and once with turns truncated before an end
    token. Raises ValueError if the resulting tokens differ from those of the template applied to the whole
    conversation. `mode`: strict, ignore_strippable (white space may differ) or disable (no check).
    """
    if mode == "disable":
        return []
    return [f"the chat template {finding}." for finding in (*_missing_features(chat), *_rewritten_turns(chat, mode))]


def _missing_features(chat: Chat) -> Iterator[str]:
    """Yield descriptions of features that the template does not have."""
    if chat.has_tools and not chat.style.tool_role:
        yield "has no role for tools: tool results are sent as a user message in <tool_response> tags"
    if chat.has_tools and chat.turns.tool_name not in chat.render([FIRST], generation_prompt=True):
        yield "does not list the tools: describe them, and how to call them, in the prompt"


def _rewritten_turns(chat: Chat, mode: str) -> Iterator[str]:
    """Yield descriptions of the changes that the template makes to earlier turns."""
    user = [_USER_MESSAGE]
    tools = [tool_message(chat.turns.tool_name, f"Result {number}.", number) for number in range(2)]
    conversations: list[tuple[str, list[Messages]]] = [("a user", [user, user])]
    if chat.has_tools:
        conversations += [
            ("a tool", [tools[:1], tools[:1]]),
            ("several tools", [tools, tools]),
            ("a user", [tools, user]),
        ]
    changes: dict[str, list[str]] = {}
    for replier, rounds in conversations:
        change = _compare(chat, mode, replier, rounds)
        if change is not None and replier not in changes.setdefault(change, []):
            changes[change].append(replier)
    for change, repliers in changes.items():
        yield f"{change} after a reply of {' or '.join(repliers)}. Trajectories keep every turn as it was sampled"


def _compare(chat: Chat, mode: str, replier: str, rounds: Sequence[Messages]) -> str | None:
    """Simulate a conversation: for each of `rounds`, one turn of the model and these replies to it.

    Returns a description of the change that the template makes to earlier turns; None: it makes none.
    """
    probe = _Probe(chat)
    messages, prompt_text = probe.first, chat.render(probe.first, generation_prompt=True)
    contexts = [_SimulatedContext(chat, end, chat.encode(prompt_text)) for end in _end_tokens_to_check(chat)]
    for number, replies in enumerate(rounds):
        response = probe.response(number, replies)
        turn = chat.turns.turn_text(messages, response, probe.final_text(number))
        earlier, messages = messages, [*messages, response, *chat.style.to_template_format(replies)]
        next_prompt_text = chat.render(messages, generation_prompt=True)
        change = probe.change(prompt_text, next_prompt_text, number)
        # If the template rewrote earlier turns, this round is comparable only if the new text still contains the prompt
        # and the turn verbatim.
        is_comparable = change is None or (turn is not None and next_prompt_text.startswith(prompt_text + turn))
        if turn is not None and is_comparable:
            expected_ids = chat.encode(next_prompt_text)
            closing_text = _closing_text(chat, earlier, response, replies, probe.final_text(number))
            text_after_turn = next_prompt_text.removeprefix(prompt_text + turn)
            for context in contexts:
                context.add(prompt_text, turn, replies, closing_text, text_after_turn)
                context.compare(expected_ids, mode, replier)
        if change is not None:
            return change
        prompt_text = next_prompt_text
    return None


def _end_tokens_to_check(chat: Chat) -> list[int | None]:
    """Return the end tokens that are special tokens of the tokenizer; None stands for a truncated turn."""
    return [None, *sorted(chat.end_ids & chat.turns.special_token_ids)]


def _closing_text(chat: Chat, messages: Messages, response: Message, replies: Messages, final: str) -> str:
    """Return the text that the template writes after a response, up to and including its last end token ("" if none).

    It is derived from rendered text alone, not from the end tokens that `TurnTemplate` detects. `replies`: messages
    after the response. `final`: see `TurnTemplate.turn_text`.
    """
    start = chat.render(messages, generation_prompt=True) + (chat.turns.turn_text(messages, response, final) or "")
    formatted = chat.style.to_template_format(replies)
    after_last = chat.render([*messages, response], generation_prompt=False).removeprefix(start)
    after_earlier = chat.render([*messages, response, *formatted], generation_prompt=True).removeprefix(start)
    tokens = closing_tokens(after_last, after_earlier, chat.turns.special_tokens)
    if tokens:
        # The template writes the same tokens whether or not the response is the last message: they close it.
        return after_earlier[: tokens[-1].end()]
    if formatted[0]["role"] == "user":
        # In the text between the response and the user message's content, remove the tokens that open the message.
        return _closing_text_before_user(chat, after_earlier.partition(str(formatted[0]["content"]))[0])
    # Before a tool result, use the closing text before a user message if the template writes the same text here.
    plain = {"role": "assistant", "content": response["content"]}
    closing_text = _closing_text(chat, messages, plain, [_USER_MESSAGE], final)
    return closing_text if after_earlier.startswith(closing_text) else ""


def _closing_text_before_user(chat: Chat, between: str) -> str:
    """Like `_closing_text`, for `between`: the text between a response and the content of the following user message.

    The text that also precedes the first user message is removed. If no token remains, the template closes responses
    and user messages with the same token, or responses with none.
    """
    before_first, _, after_first = chat.turns.render_probe([FIRST], False).rpartition(str(FIRST["content"]))
    _, _, after_first_prompted = chat.turns.render_probe([FIRST], True).rpartition(str(FIRST["content"]))
    opening_length = common_length(between[::-1], before_first[::-1])
    before_opening = between[: len(between) - opening_length]
    tokens = closing_tokens(before_opening, before_opening, chat.turns.special_tokens)
    # The tokens that close user messages, with and without a generation prompt after them.
    tokens = tokens or closing_tokens(after_first, after_first_prompted, chat.turns.special_tokens)
    closing_text = tokens[-1].string[: tokens[-1].end()] if tokens else ""
    return closing_text if between.startswith(closing_text) else ""


class _SimulatedContext:
    """The context of a simulated model that ends every turn with the same token."""

    def __init__(self, chat: Chat, end: int | None, prompt_ids: list[int]) -> None:
        """`end`: id of the end token; None: all turns are truncated."""
        self._chat, self._end = chat, end
        self._token_ids = prompt_ids
        """Token ids of the conversation so far, with the template's end tokens in place of the sampled ones."""
        self._must_match = True
        """Whether token ids must match. False after a turn that is followed by plain text: the tokenizer may merge
        both, so only decoded text is compared."""

    def add(self, prompt_text: str, turn: str, replies: Messages, closing_text: str, text_after_turn: str) -> None:
        """Append a turn of the model, which follows `prompt_text`, and the replies to it.

        `text_after_turn`: what the template renders after the turn; `closing_text`: its beginning up to the last end
        token (`_closing_text`).
        """
        chat, prompt_ids = self._chat, self._chat.encode(prompt_text)
        sampled = chat.encode(prompt_text + turn)
        sampled = sampled[len(prompt_ids) :] if sampled[: len(prompt_ids)] == prompt_ids else chat.encode(turn)
        end_ids = [] if self._end is None else [self._end]
        suffix = chat.suffix(replies, sampled + end_ids)
        self._must_match = self._must_match and bool(chat.turns.special_tokens.match(text_after_turn.lstrip()))
        # Compare the end tokens that the template writes in place of the sampled one. If the template closes turns
        # without an end token, compare the sampled one only if the text after the turn begins with it (a role token).
        if self._end is not None and closing_text:
            end_ids = chat.encode(closing_text)
        elif self._end is not None and not text_after_turn.lstrip().startswith(chat.decode([self._end])):
            end_ids = []
        self._token_ids = self._token_ids + sampled + end_ids + suffix

    def compare(self, expected_ids: list[int], mode: str, replier: str) -> None:
        """Raise ValueError if the tokens differ from `expected_ids`, those of the whole conversation."""
        if self._token_ids == expected_ids:
            return
        text, expected_text = self._chat.decode(self._token_ids), self._chat.decode(expected_ids)
        if text == expected_text and not self._must_match:
            return
        only_white_space = "".join(text.split()) == "".join(expected_text.split())
        if only_white_space and mode == "ignore_strippable":
            return
        difference = "white space" if only_white_space else "text"
        remedy = f"Set {_CHECK_KEY}=disable to skip this check"
        if only_white_space:
            remedy = f"Set {_CHECK_KEY}=ignore_strippable to ignore differences in white space"
        turn = "a truncated turn" if self._end is None else f"a turn that ends with {self._chat.decode([self._end])}"
        raise ValueError(
            f"{_CHECK_KEY} = {mode}: after a reply of {replier} to {turn}, tokens appended turn by turn are not"
            f" those of the chat template (different {difference}): {text[-_MAX_SHOWN_CHARS:]!r} instead of"
            f" {expected_text[-_MAX_SHOWN_CHARS:]!r}. {remedy}."
        )


class _Probe:
    """A conversation whose parts can be located in the text that the template renders."""

    SYSTEM = "System prompt of the probe."

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.first: list[Message] = [{"role": "system", "content": self.SYSTEM}, FIRST]
        try:
            text = chat.render(self.first, generation_prompt=True)
        except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
            self.first = [FIRST]
            text = chat.render(self.first, generation_prompt=True)
        self._generation_prompt = text[len(chat.render(self.first, generation_prompt=False)) :]
        # A generation prompt that contains </think> switches thinking off.
        self._has_thinking = "think>" in str(chat.template) and "</think>" not in self._generation_prompt

    def final_text(self, number: int) -> str:
        """The text at the end of a response's content, which is also the argument of its tool calls."""
        return f"Answer {number}."

    def response(self, number: int, replies: Messages) -> Message:
        """The response of turn `number`, to which the environment sends `replies`."""
        final = self.final_text(number)
        text = f"<think>\n{self._thought(number)}\n</think>\n\n{final}" if self._has_thinking else final
        return self._chat.style.assistant_message(text, replies, final)

    def change(self, before: str, after: str, number: int) -> str | None:
        """Describe the change that the template made to earlier turns; None: it made none.

        `before`: the prompt of turn `number`; `after`: the prompt of the next turn.
        """
        if self._has_thinking and any(self._thought(earlier) not in after for earlier in range(number + 1)):
            return "drops the thinking of earlier turns"
        if after.startswith(before):
            return None
        for part, text in (("the system prompt", self.SYSTEM), ("the list of tools", self._chat.turns.tool_name)):
            if text in before and before.find(text) != after.find(text):
                return f"moves or leaves out {part}"
        # "\0" differs from every character: there is a difference even if `after` is a prefix of `before`.
        start = next(index for index, (old, new) in enumerate(zip(before, after + "\0", strict=False)) if old != new)
        if start >= len(before) - len(self._generation_prompt):
            return f"does not repeat {before[start:]!r} of its generation prompt in earlier turns"
        return f"writes {after[start : start + 40]!r} instead of {before[start : start + 40]!r} in earlier turns"

    def _thought(self, number: int) -> str:
        return f"Thought {number}."
