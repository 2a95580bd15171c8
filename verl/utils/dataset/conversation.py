"""Conversations as training rows: tokens with loss weights, non-zero on the text that the assistant generates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from verl.utils.dataset.chat import Messages, with_json_tool_calls, with_parsed_tool_calls
from verl.utils.end_tokens import find_end_tokens
from verl.utils.turn_template import added_tokens, role_tokens

LOSS = "loss"
"""The field of a message with the loss weight of its tokens."""

Span = tuple[int, int]
# The text of a row in order: (piece, loss weight).
Pieces = list[tuple[str, float]]
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Markers of generated text: two Unicode noncharacters, which no text contains.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


@dataclass
class WeightedTokens:
    """Token ids and, of the same length, the loss weight of each."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def ids_up_to_answer(row: WeightedTokens) -> list[int]:
    """Return the token ids up to the end of the last answer, where a reward model's score is read."""
    return row.ids[: max(index for index, weight in enumerate(row.weights) if weight) + 1]


class ConversationEncoder:
    """Converts conversations to rows with the tokenizer's chat template.

    The loss falls on the text that the template marks as generated ({% generation %}); without marks, on the text after
    the generation prompt, up to and including the end token. Pieces are tokenised separately, as in generation: the
    model is trained on the prompt tokens that it will see. A template that rewrites earlier turns when later ones are
    added (it drops their thinking) renders several texts: each becomes its own row (`split`), or an error. Without a
    template, a prompt is plain text as in `PromptEncoder`, directly followed by the answer.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any], last_turn_only: bool, split: bool = True
    ) -> None:
        self._tokenizer, self._last_turn_only, self._split = tokenizer, last_turn_only, split
        kwargs = dict(template_kwargs)
        self._user_template, self._kwargs = kwargs.pop("chat_template", None), kwargs
        self._has_template = bool(self._user_template or tokenizer.chat_template)
        self._ends = find_end_tokens(None, None, tokenizer, template_kwargs).ids
        self._end_tokens = tuple(map(str, tokenizer.convert_ids_to_tokens(sorted(self._ends))))
        self._role_tokens = role_tokens(tokenizer, template_kwargs) if self._has_template else {}
        self._two_end_tokens = _two_tokens(added_tokens(tokenizer))
        self._begins_with_space = tokenizer.tokenize("a")[0].startswith("▁")

    def rows(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[WeightedTokens]:
        """Return one row, or one for each text that the template renders of the conversation."""
        return self.tokenize([self.render(messages, tools, **template_kwargs)])[0]

    def render(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[Pieces]:
        """Return the texts of the rows, cut into weighted pieces."""
        weights = self._turn_weights(messages)
        plain = [{name: value for name, value in message.items() if name != LOSS} for message in messages]
        chat = self._rendering(plain, tools, template_kwargs)
        rows: list[Pieces] = [[]]
        done = ""
        for turn, weight in weights.items():
            text, spans = self._with_role_token(chat, turn, plain)
            if not text[: spans[0][0]].startswith(done):
                if not self._split:
                    raise ValueError(
                        f"{chat.rewrites.format(turn)}. Set data.rewritten_turns=split, which makes a row of each of"
                        " its texts, or write one row per answer, with the conversation up to it."
                    )
                rows.append([])
                done = ""
            rows[-1] += _pieces(text, spans, len(done), weight)
            done = text
        return rows

    def tokenize(self, conversations: Sequence[Sequence[Pieces]]) -> list[list[WeightedTokens]]:
        """Return the rows of results of `render`; many at once are faster, as the tokenizer uses all cores."""
        rows = iter(self._tokenize_rows([pieces for texts in conversations for pieces in texts]))
        return [[next(rows) for _ in texts] for texts in conversations]

    def learns_end_token(self, row: WeightedTokens) -> bool:
        """Return whether the loss of the row's last answer includes an end token."""
        last = max(index for index, weight in enumerate(row.weights) if weight)
        return row.ids[last] in self._ends

    def describe(self, row: WeightedTokens) -> str:
        """Return the row as text; parts with a loss are in ⟦ ⟧, with their weight if it is not 1."""
        text, start = "", 0
        for end in range(1, len(row.ids) + 1):
            if end == len(row.ids) or row.weights[end] != row.weights[start]:
                part, weight = self._tokenizer.decode(row.ids[start:end]), row.weights[start]
                text += part if not weight else f"⟦{'' if weight == 1 else f'{weight:g}: '}{part}⟧"
                start = end
        return text

    def _rendering(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any]
    ) -> _TemplateRendering | _PlainRendering:
        if not self._has_template:
            return _PlainRendering(self._tokenizer, messages, tools)
        kwargs = {**self._kwargs, **template_kwargs}
        return _TemplateRendering(self._tokenizer, messages, tools, self._user_template, kwargs, self._two_end_tokens)

    def _with_role_token(
        self, chat: _TemplateRendering | _PlainRendering, turn: int, messages: Messages
    ) -> tuple[str, list[Span]]:
        """The result of `chat.up_to_turn`; if the next role token ends a turn (GLM), it is added to the answer."""
        text, spans = chat.up_to_turn(turn)
        if isinstance(chat, _PlainRendering) or chat.marks_generation or not self._role_tokens:
            return text, spans
        if text.rstrip().endswith(self._end_tokens):
            return text, spans
        if turn + 1 == len(messages):
            token = self._role_tokens.get("tool" if messages[turn].get("tool_calls") else "user", "")
        else:
            token = self._role_tokens.get(messages[turn + 1]["role"], "")
            after = chat.after(turn)
            if after is not None:  # another token may follow, or another role may open with this one
                token = next((token for token in self._role_tokens.values() if after.startswith(token)), "")
        return text + token, [*spans[:-1], (spans[-1][0], spans[-1][1] + len(token))]

    def _turn_weights(self, messages: Messages) -> dict[int, float]:
        """Loss weights by number of the assistant's messages, without zeros."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ValueError(
                f"the conversation has no message of the assistant to learn from (roles: {roles}). Add one."
            )
        weights = {}
        for number, message in enumerate(messages):
            default = number == turns[-1] if self._last_turn_only else number in turns
            weight = message.get(LOSS, default)
            if not isinstance(weight, bool | int | float) or not 0 <= weight < float("inf"):
                raise ValueError(f"'{LOSS}' of message {number} is {weight!r}. Write 0, 1 or another weight.")
            if weight and number not in turns:
                raise ValueError(
                    f"'{LOSS}' of message {number} is {weight!r}, but its role is {message['role']}: only the"
                    " assistant's messages are learned. Write 0, or leave it out."
                )
            weights[number] = float(weight)
        if not any(weights.values()):
            raise ValueError(f"'{LOSS}' is 0 in all messages of the assistant. Give one a weight, or remove the row.")
        return {number: weight for number, weight in weights.items() if weight}

    def _tokenize_rows(self, rows: Sequence[Pieces]) -> list[WeightedTokens]:
        plain = not self._has_template
        rows = [[piece for at, piece in enumerate(row) if piece[0] or (plain and at == 0)] for row in rows]
        encoded = self._tokenize_pieces([[text for text, _ in row] for row in rows])
        if plain:  # a template would have written the special tokens that begin a text
            beginnings = self._tokenizer([row[0][0] for row in rows], add_special_tokens=True)["input_ids"]
            encoded = [[first, *ids[1:]] for first, ids in zip(beginnings, encoded, strict=True)]
        return [self._weighted(ids, row) for ids, row in zip(encoded, rows, strict=True)]

    def _weighted(self, encoded: Sequence[list[int]], pieces: Pieces) -> WeightedTokens:
        row = WeightedTokens()
        for ids, (_, weight) in zip(encoded, pieces, strict=True):
            sampled = self.sampled_length(ids) if weight else 0
            row.ids += ids
            row.weights += [weight] * sampled + [0.0] * (len(ids) - sampled)
        return row

    def _tokenize_pieces(self, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Token ids of each piece. If the tokenizer adds a space before a text (SentencePiece), pieces are tokenised
        as continuations of the piece before: no model samples that space after its prompt."""
        alone = self._token_ids(rows)
        if not self._begins_with_space:
            return alone
        joined = self._token_ids([[a + b for a, b in pairwise(texts)] for texts in rows])
        tokenized = []
        for ids, pairs in zip(alone, joined, strict=True):
            following = [
                pair[len(before) :] if pair[: len(before)] == before else after
                for pair, before, after in zip(pairs, ids, ids[1:], strict=False)
            ]
            tokenized.append([*ids[:1], *following])
        return tokenized

    def _token_ids(self, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        texts = [text for row in rows for text in row]
        if not texts:
            return [[] for _ in rows]
        ids = iter(self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"])
        return [[next(ids) for _ in row] for row in rows]

    def sampled_length(self, ids: list[int]) -> int:
        """Return how many tokens of an answer the model samples: templates may add white space after the end token."""
        last = next((end for end in range(len(ids), 0, -1) if ids[end - 1] in self._ends), 0)
        return last if last and not self._tokenizer.decode(ids[last:]).strip() else len(ids)


class _PlainRendering:
    """The texts of one conversation without a template: contents one per line, an end token after an answer."""

    rewrites = "without a chat template, the text before message {} has no end tokens of earlier answers"
    marks_generation = False

    def __init__(self, tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> None:
        calling = next((number for number, message in enumerate(messages) if message.get("tool_calls")), None)
        if tools or calling is not None:
            unsupported = "tools" if calling is None else f"the 'tool_calls' of message {calling}"
            raise ValueError(
                f"the tokenizer has no chat template to render {unsupported}. Use a model that has one (-Instruct,"
                " -it), or set one (data.apply_chat_template_kwargs.chat_template)."
            )
        self._contents, self._end = [str(message["content"]) for message in messages], tokenizer.eos_token or ""

    def up_to_turn(self, turn: int) -> tuple[str, list[Span]]:
        """Return the text up to and including a message of the assistant, and the span that it generates."""
        before = "\n".join(self._contents[:turn])
        text = before + self._contents[turn] + self._end
        return text, [(len(before), len(text))]


class _TemplateRendering:
    """The texts that a template renders of the beginnings of one conversation."""

    rewrites = "the chat template rewrites the text before message {} (it may drop the thinking of earlier turns)"

    def __init__(
        self,
        tokenizer: Any,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        kwargs: Mapping[str, Any],
        two_end_tokens: re.Pattern[str],
    ) -> None:
        self._messages = [with_parsed_tool_calls(number, message) for number, message in enumerate(messages)]
        self._forms = [self._messages]
        if any("tool_calls" in message for message in self._messages):
            self._forms.append([with_json_tool_calls(message) for message in self._messages])
        self._tokenizer, self._tools, self._two_end_tokens = tokenizer, tools, two_end_tokens
        template = tokenizer.get_chat_template(template, tools)
        marked = _GENERATION.sub(_as_marker, template)
        self._template, self._kwargs = marked, kwargs
        self.marks_generation = marked != template
        """Whether the template marks the text that the assistant generates ({% generation %} blocks)."""

    def up_to_turn(self, turn: int) -> tuple[str, list[Span]]:
        """Return the text up to and including a message of the assistant, and the spans that it generates."""
        if turn == 0:
            raise ValueError(
                f"message 0 is the assistant's: there is no prompt before it. Set '{LOSS}' of that message to 0, or"
                " remove it."
            )
        text, spans = _remove_markers(self._render(turn + 1, generation_prompt=False))
        text = self._without_second_end(turn, text)
        if self.marks_generation:
            before, earlier = _remove_markers(self._render(turn, generation_prompt=False))
            if text.startswith(before):
                start = len(before)
                spans = [span for span in spans if span[0] >= start]
            else:  # the beginning is rewritten: the first spans are those of earlier turns
                spans = spans[len(earlier) :]
                start = spans[0][0] if spans else 0
            spans = _clip(spans, self._generation_start(turn, text), len(text))
            if not spans:
                raise ValueError(
                    f"the chat template marks nothing of message {turn} as generated by the assistant. Set"
                    f" '{LOSS}' of that message to 0, or set a template that does"
                    " (data.apply_chat_template_kwargs.chat_template)."
                )
        else:
            before = self._render(turn, generation_prompt=True)
            if not text.startswith(before):
                raise ValueError(self._rewrite_problem(turn, text, before))
            start = len(before)
            spans = [(start, len(text))]
        self._check_complete(turn, text, start)
        self._check_tools(text)
        return text, spans

    def after(self, turn: int) -> str | None:
        """The rendered text after a message up to the end of the next one.

        None: the template rewrites the text before it, or does not render the conversation up to the next message (the
        first of several tool results).
        """
        try:
            text, both = (_remove_markers(self._render(turn + count, generation_prompt=False))[0] for count in (1, 2))
        except ValueError:
            return None
        return both.removeprefix(text) if both.startswith(text) else None

    def _render(self, count: int, generation_prompt: bool, then: Sequence[Mapping[str, Any]] = ()) -> str:
        causes = []
        for messages in self._forms:
            try:
                return self._tokenizer.apply_chat_template(
                    [*messages[:count], *then],
                    tools=self._tools,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self._kwargs,
                )
            except Exception as error:  # noqa: BLE001 - a template is a program: it may raise anything
                causes.append(error)
        cause, roles = causes[0], ", ".join(str(message["role"]) for message in self._messages[:count])
        raise ValueError(
            f"the chat template rejects the first {count} messages ({type(cause).__name__}: {cause}; roles:"
            f" {roles}). Write the messages in the form that the model's template accepts."
        ) from cause

    def _without_second_end(self, turn: int, text: str) -> str:
        """The text without a second end token that the template (Phi-3) writes only at the end of a conversation."""
        match = self._two_end_tokens.search(text)
        if not match:
            return text
        try:
            followed = _remove_markers(self._render(turn + 1, False, [{"role": "user", "content": "?"}]))[0]
        except ValueError:  # the template allows no user message here, so it has no such case
            return text
        answer, both = text[: match.end(1)], text[: match.end(2)]
        return answer if followed.startswith(answer) and not followed.startswith(both) else text

    def _generation_start(self, turn: int, text: str) -> int:
        """The end of the generation prompt in a text; 0 if the text does not begin with it."""
        before = _remove_markers(self._render(turn, generation_prompt=True))[0]
        return len(before) if text.startswith(before) else 0

    def _rewrite_problem(self, turn: int, text: str, before: str) -> str:
        """Why the text that the assistant generates cannot be located."""
        earlier = self._render(turn, generation_prompt=False)
        if text.startswith(earlier):
            prompt, rendered = before[len(earlier) :], text[len(earlier) :]
            return (
                f"the generation prompt of the chat template is {prompt!r}, but message {turn} is rendered as"
                f" {rendered[: len(prompt) + 20]!r}: the model would learn to continue a text that it never sees. Write"
                " the message as the model would (with its thinking), or set another template"
                " (data.apply_chat_template_kwargs.chat_template)."
            )
        return (
            f"the chat template changes the text before message {turn} when that message is added, so its own text"
            " cannot be located. Set a template that does not (data.apply_chat_template_kwargs.chat_template)."
        )

    def _check_complete(self, turn: int, text: str, start: int) -> None:
        """Raise ValueError if parts of the message are not in the text, white space aside."""
        message = self._messages[turn]
        expected = [message[name] for name in (*_REASONING_FIELDS, "content") if isinstance(message.get(name), str)]
        expected += [str(call["function"]["name"]) for call in message.get("tool_calls", ()) if "function" in call]
        rendered = _without_spaces(text[start:])
        for part in expected:
            if _without_spaces(part) in rendered:
                continue
            earlier = _remove_markers(self._render(turn, generation_prompt=False))[0]
            with_prompt = text.removeprefix(earlier)  # the part may begin in the generation prompt: <think>
            if _without_spaces(part) in _without_spaces(with_prompt):
                continue
            raise ValueError(
                f"the chat template drops or changes part of message {turn}: {part[:60]!r} is not in its text"
                " unchanged. Set a template that keeps it (data.apply_chat_template_kwargs.chat_template), remove that"
                f" part, or set '{LOSS}' of the message to 0."
            )

    def _check_tools(self, text: str) -> None:
        """Raise ValueError if a tool is not in the text: the model must not learn to call unknown tools."""
        for tool in self._tools or ():
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and name not in text:
                raise ValueError(
                    f"the chat template does not render the tool {name!r}, so the model would not know it. Set a"
                    " template that does (data.apply_chat_template_kwargs.chat_template), or leave the tools out."
                )


def _as_marker(tag: re.Match[str]) -> str:
    """A generation tag as a block that writes a marker; its white-space control is kept."""
    left, end, right = tag.groups()
    return f"{{%{left} if true %}}{_END if end else _BEGIN}{{% endif {right}%}}"


def _remove_markers(text: str) -> tuple[str, list[Span]]:
    """Return the text without markers, and the spans between them."""
    parts = re.split(f"([{_BEGIN}{_END}])", text)
    plain, spans, start = "", [], 0
    for part in parts:
        if part == _BEGIN:
            start = len(plain)
        elif part == _END:
            spans += [(start, len(plain))] if len(plain) > start else []
        else:
            plain += part
    return plain, spans


def _clip(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The parts of spans from `start` to `end`: a template may mark its generation prompt, which is never sampled."""
    return [(max(a, start), min(b, end)) for a, b in spans if b > start and a < end]


def _two_tokens(tokens: Iterable[str]) -> re.Pattern[str]:
    """Two added tokens at the end of a text, white space aside."""
    one = "|".join(sorted(map(re.escape, tokens), key=len, reverse=True)) or "(?!)"
    return re.compile(rf"({one})\s*({one})\s*\Z")


def _pieces(text: str, spans: Sequence[Span], done: int, weight: float) -> Pieces:
    """The text from `done` on, cut into (piece, loss weight)."""
    pieces, position = [], done
    for start, end in spans:
        pieces += [(text[position:start], 0.0), (text[start:end], weight)]
        position = end
    return [*pieces, (text[position:], 0.0)]


def _without_spaces(text: str) -> str:
    return "".join(text.split())
