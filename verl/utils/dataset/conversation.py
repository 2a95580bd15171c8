"""Conversations to learn from: which text of a chat template's is the assistant's own, as tokens with weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from verl.utils.dataset.chat import Messages
from verl.utils.dataset.conversation_tools import with_parsed_calls, with_written_calls
from verl.utils.end_tokens import find_end_tokens
from verl.utils.turn_template import added_tokens, role_tokens

LOSS = "loss"
"""The field of a message that says how much its tokens count."""

Span = tuple[int, int]
# Of a row's text, in order: (piece, how much it counts).
Pieces = list[tuple[str, float]]
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Of two characters that no text holds: Unicode keeps them out of it.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


@dataclass
class LearnedRow:
    """Token ids and, of the same length, how much predicting each of them counts."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def up_to_answer(row: LearnedRow) -> list[int]:
    """Its tokens up to the end of the last answer: where a reward model of ours is read."""
    return row.ids[: max(place for place, weight in enumerate(row.weights) if weight) + 1]


class ConversationEncoder:
    """Turns conversations into rows by the tokenizer's chat template.

    Where the template marks what the assistant says ({% generation %}), that is learned; else what follows its
    generation prompt, up to and including the end token. Pieces are tokenised on their own, as in generation: the model
    is trained on the very prompt tokens it will see. A template that rewrites earlier turns when later ones come (it
    drops their thinking) shows the model several texts: each is a row of its own (`split`), or an error. Without a
    template a prompt is the plain text that `PromptEncoder` makes of it, and an answer follows it at once.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any], last_turn_only: bool, split: bool = True
    ) -> None:
        self._tokenizer, self._last_turn_only, self._split = tokenizer, last_turn_only, split
        kwargs = dict(template_kwargs)
        self._given_template, self._kwargs = kwargs.pop("chat_template", None), kwargs
        self._has_template = bool(self._given_template or tokenizer.chat_template)
        self._ends = find_end_tokens(None, None, tokenizer, template_kwargs).ids
        self._end_tokens = tuple(map(str, tokenizer.convert_ids_to_tokens(sorted(self._ends))))
        self._role_tokens = role_tokens(tokenizer, template_kwargs) if self._has_template else {}
        self._closed = _two_tokens(added_tokens(tokenizer))
        self._begins_with_space = tokenizer.tokenize("a")[0].startswith("▁")

    def rows(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[LearnedRow]:
        """One row, or one for every text that the template makes of the conversation."""
        return self.encoded([self.written(messages, tools, **template_kwargs)])[0]

    def written(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[Pieces]:
        """The texts of these rows."""
        weights = self._turn_weights(messages)
        said = [{name: value for name, value in message.items() if name != LOSS} for message in messages]
        chat = self._chat(said, tools, template_kwargs)
        rows: list[Pieces] = [[]]
        done = ""
        for turn, weight in weights.items():
            text, spans = self._with_role_token(chat, turn, said)
            if not text[: spans[0][0]].startswith(done):
                if not self._split:
                    raise ValueError(
                        f"{chat.rewrites.format(turn)}. Set data.rewritten_turns=split, which makes a row of each of"
                        " its texts, or give one row per answer, with the conversation up to it."
                    )
                rows.append([])
                done = ""
            rows[-1] += _pieces(text, spans, len(done), weight)
            done = text
        return rows

    def encoded(self, conversations: Sequence[Sequence[Pieces]]) -> list[list[LearnedRow]]:
        """What `written` gave of each, as tokens: many at once are faster, as the tokenizer uses all cores."""
        rows = iter(self._encoded([pieces for texts in conversations for pieces in texts]))
        return [[next(rows) for _ in texts] for texts in conversations]

    def ends(self, row: LearnedRow) -> bool:
        """Whether an end token is learned with the row's last answer."""
        last = max(place for place, weight in enumerate(row.weights) if weight)
        return row.ids[last] in self._ends

    def shown(self, row: LearnedRow) -> str:
        """The row as text, what is learned in ⟦ ⟧, with its weight where that is not 1."""
        text, start = "", 0
        for place in range(1, len(row.ids) + 1):
            if place == len(row.ids) or row.weights[place] != row.weights[start]:
                part, weight = self._tokenizer.decode(row.ids[start:place]), row.weights[start]
                text += part if not weight else f"⟦{'' if weight == 1 else f'{weight:g}: '}{part}⟧"
                start = place
        return text

    def _chat(
        self, said: Messages, tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any]
    ) -> _Chat | _PlainText:
        if not self._has_template:
            return _PlainText(self._tokenizer, said, tools)
        kwargs = {**self._kwargs, **template_kwargs}
        return _Chat(self._tokenizer, said, tools, self._given_template, kwargs, self._closed)

    def _with_role_token(self, chat: _Chat | _PlainText, turn: int, messages: Messages) -> tuple[str, list[Span]]:
        """The result of `chat.said`; if the next role token ends a turn (GLM), it is added to the answer."""
        text, spans = chat.said(turn)
        if isinstance(chat, _PlainText) or chat.marks or not self._role_tokens:
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
        """How much each message of the assistant counts, without those that do not."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ValueError(
                f"the conversation has no message of the assistant to learn from (roles: {roles}). Add one."
            )
        found = {}
        for number, message in enumerate(messages):
            usual = number == turns[-1] if self._last_turn_only else number in turns
            weight = message.get(LOSS, usual)
            if not isinstance(weight, bool | int | float) or not 0 <= weight < float("inf"):
                raise ValueError(f"'{LOSS}' of message {number} is {weight!r}. Write 0, 1 or another weight.")
            if weight and number not in turns:
                raise ValueError(
                    f"'{LOSS}' of message {number} is {weight!r}, but {message['role']} says it: only what the"
                    " assistant says is learned. Write 0, or leave it out."
                )
            found[number] = float(weight)
        if not any(found.values()):
            raise ValueError(f"'{LOSS}' is 0 in all messages of the assistant. Give one a weight, or remove the row.")
        return {number: weight for number, weight in found.items() if weight}

    def _encoded(self, rows: Sequence[Pieces]) -> list[LearnedRow]:
        plain = not self._has_template
        rows = [[piece for at, piece in enumerate(row) if piece[0] or (plain and at == 0)] for row in rows]
        encoded = self._tokenised([[text for text, _ in row] for row in rows])
        if plain:  # a template would have written the special tokens that begin a text
            begun = self._tokenizer([row[0][0] for row in rows], add_special_tokens=True)["input_ids"]
            encoded = [[first, *ids[1:]] for first, ids in zip(begun, encoded, strict=True)]
        return [self._weighted(ids, row) for ids, row in zip(encoded, rows, strict=True)]

    def _weighted(self, encoded: Sequence[list[int]], pieces: Pieces) -> LearnedRow:
        row = LearnedRow()
        for ids, (_, weight) in zip(encoded, pieces, strict=True):
            own = self.until_end(ids) if weight else 0
            row.ids += ids
            row.weights += [weight] * own + [0.0] * (len(ids) - own)
        return row

    def _tokenised(self, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Each text of a row on its own; where the tokenizer begins a text with a space of its own (SentencePiece), as
        what follows the text before it: no model samples that space after its prompt."""
        alone = self._token_ids(rows)
        if not self._begins_with_space:
            return alone
        joined = self._token_ids([[a + b for a, b in pairwise(texts)] for texts in rows])
        found = []
        for ids, boths in zip(alone, joined, strict=True):
            following = [
                both[len(before) :] if both[: len(before)] == before else after
                for both, before, after in zip(boths, ids, ids[1:], strict=False)
            ]
            found.append([*ids[:1], *following])
        return found

    def _token_ids(self, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        texts = [text for row in rows for text in row]
        made = (
            self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"] if texts else ()
        )
        ids = iter(made)
        return [[next(ids) for _ in row] for row in rows]

    def until_end(self, ids: list[int]) -> int:
        """How many tokens the model would have sampled itself: templates may add a line break after the end token."""
        last = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in self._ends), 0)
        return last if last and not self._tokenizer.decode(ids[last:]).strip() else len(ids)


class _PlainText:
    """The texts of one conversation where there is no template: contents one per line, an end token after an answer."""

    rewrites = "without a chat template, what was said before message {} holds no end tokens of earlier answers"
    marks = False

    def __init__(self, tokenizer: Any, messages: Messages, tools: Sequence[Mapping[str, Any]] | None) -> None:
        calling = next((number for number, message in enumerate(messages) if message.get("tool_calls")), None)
        if tools or calling is not None:
            what = "tools" if calling is None else f"the 'tool_calls' of message {calling}"
            raise ValueError(
                f"the tokenizer has no chat template to write {what}. Take a model that has one (-Instruct, -it), or"
                " give one (data.apply_chat_template_kwargs.chat_template)."
            )
        self._contents, self._end = [str(message["content"]) for message in messages], tokenizer.eos_token or ""

    def said(self, turn: int) -> tuple[str, list[Span]]:
        """The text up to and with a message of the assistant, and which part of it is its own words."""
        before = "\n".join(self._contents[:turn])
        text = before + self._contents[turn] + self._end
        return text, [(len(before), len(text))]


class _Chat:
    """The texts that a template makes of the beginnings of one conversation."""

    rewrites = "the chat template rewrites what was said before message {} (it may drop the thinking of earlier turns)"

    def __init__(
        self,
        tokenizer: Any,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        kwargs: Mapping[str, Any],
        closed: re.Pattern[str],
    ) -> None:
        self._messages = [with_parsed_calls(number, message) for number, message in enumerate(messages)]
        self._forms = [self._messages]
        if any("tool_calls" in message for message in self._messages):
            self._forms.append([with_written_calls(message) for message in self._messages])
        self._tokenizer, self._tools, self._closed = tokenizer, tools, closed
        template = tokenizer.get_chat_template(template, tools)
        marked = _GENERATION.sub(_as_text, template)
        self._template, self._kwargs = marked, kwargs
        self.marks = marked != template
        """Whether the template marks what the assistant generates ({% generation %} blocks)."""

    def said(self, turn: int) -> tuple[str, list[Span]]:
        """The text up to and with a message of the assistant, and which parts of it are its own words."""
        if turn == 0:
            raise ValueError(
                f"message 0 is the assistant's: nothing is there that it answers. Set '{LOSS}' of that message to 0, or"
                " remove it."
            )
        text, spans = _unmarked(self._render(turn + 1, generation_prompt=False))
        text = self._without_closing(turn, text)
        if self.marks:
            before, earlier = _unmarked(self._render(turn, generation_prompt=False))
            if text.startswith(before):
                start = len(before)
                spans = [span for span in spans if span[0] >= start]
            else:  # what comes first is written anew: those of earlier turns are the first
                spans = spans[len(earlier) :]
                start = spans[0][0] if spans else 0
            spans = _within(spans, self._asked(turn, text), len(text))
            if not spans:
                raise ValueError(
                    f"the chat template marks nothing of message {turn} as generated by the assistant. Set"
                    f" '{LOSS}' of that message to 0, or give a template that does"
                    " (data.apply_chat_template_kwargs.chat_template)."
                )
        else:
            before = self._render(turn, generation_prompt=True)
            if not text.startswith(before):
                raise ValueError(self._why_not(turn, text, before))
            start = len(before)
            spans = [(start, len(text))]
        self._refuse_lost_words(turn, text, start)
        self._refuse_lost_tools(text)
        return text, spans

    def after(self, turn: int) -> str | None:
        """The rendered text after a message up to the end of the next one.

        None: the template rewrites the text before it, or does not render the conversation up to the next message (the
        first of several tool results).
        """
        try:
            text, both = (_unmarked(self._render(turn + count, generation_prompt=False))[0] for count in (1, 2))
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
            f"the chat template refuses its first {count} messages ({type(cause).__name__}: {cause}; roles:"
            f" {roles}). Write the messages as the model's template wants them."
        ) from cause

    def _without_closing(self, turn: int, text: str) -> str:
        """Without what ends the conversation rather than the answer: Phi-3's template writes a second end token, which
        goes when somebody speaks after it."""
        found = self._closed.search(text)
        if not found:
            return text
        try:
            followed = _unmarked(self._render(turn + 1, False, [{"role": "user", "content": "?"}]))[0]
        except ValueError:  # nobody may speak here: then this template writes nothing for the case that nobody does
            return text
        answer, both = text[: found.end(1)], text[: found.end(2)]
        return answer if followed.startswith(answer) and not followed.startswith(both) else text

    def _asked(self, turn: int, text: str) -> int:
        """Where the generation prompt ends in a text; 0 where it does not begin with it."""
        before = _unmarked(self._render(turn, generation_prompt=True))[0]
        return len(before) if text.startswith(before) else 0

    def _why_not(self, turn: int, text: str, before: str) -> str:
        """Why the assistant's words cannot be told from the rest of the text."""
        earlier = self._render(turn, generation_prompt=False)
        if text.startswith(earlier):
            asked, written = before[len(earlier) :], text[len(earlier) :]
            return (
                f"the chat template asks for an answer with {asked!r}, but writes message {turn} as"
                f" {written[: len(asked) + 20]!r}: the model would learn to go on from a text that it never sees. Write"
                " the message as the model would (with its thinking), or give another template"
                " (data.apply_chat_template_kwargs.chat_template)."
            )
        return (
            f"the chat template changes what was said before message {turn} once it is there, so its words cannot be"
            " told from the rest. Give a template that does not (data.apply_chat_template_kwargs.chat_template)."
        )

    def _refuse_lost_words(self, turn: int, text: str, start: int) -> None:
        """What is to be learned must be in the text; templates differ in white space, which does not count."""
        message = self._messages[turn]
        wanted = [message[name] for name in (*_THOUGHTS, "content") if isinstance(message.get(name), str)]
        wanted += [str(call["function"]["name"]) for call in message.get("tool_calls", ()) if "function" in call]
        written = _squeezed(text[start:])
        for words in wanted:
            if _squeezed(words) in written:
                continue
            earlier = _unmarked(self._render(turn, generation_prompt=False))[0]
            if _squeezed(words) in _squeezed(text.removeprefix(earlier)):  # begun by the generation prompt: <think>
                continue
            raise ValueError(
                f"the chat template drops or changes part of message {turn}: {words[:60]!r} is not in its text as"
                " written. Give a template that keeps it (data.apply_chat_template_kwargs.chat_template), remove that"
                f" part, or set '{LOSS}' of the message to 0."
            )

    def _refuse_lost_tools(self, text: str) -> None:
        """A model must not learn to call what it is not told of."""
        for tool in self._tools or ():
            inner = tool.get("function", tool)
            name = inner.get("name") if isinstance(inner, Mapping) else None
            if isinstance(name, str) and name not in text:
                raise ValueError(
                    f"the chat template does not write the tool {name!r}, so the model would not know of it. Give a"
                    " template that does (data.apply_chat_template_kwargs.chat_template), or leave the tools out."
                )


def _as_text(tag: re.Match[str]) -> str:
    """A generation tag as a block that writes a character; how it trims the text around it stays."""
    left, end, right = tag.groups()
    return f"{{%{left} if true %}}{_END if end else _BEGIN}{{% endif {right}%}}"


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """The text without marks, and the spans that they enclosed."""
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


def _within(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """What of them is from `start` to `end`: a template may mark its generation prompt, too, which is never sampled."""
    return [(max(a, start), min(b, end)) for a, b in spans if b > start and a < end]


def _two_tokens(tokens: Iterable[str]) -> re.Pattern[str]:
    """Two added tokens at the end of a text, white space aside."""
    one = "|".join(sorted(map(re.escape, tokens), key=len, reverse=True)) or "(?!)"
    return re.compile(rf"({one})\s*({one})\s*\Z")


def _pieces(text: str, spans: Sequence[Span], done: int, weight: float) -> Pieces:
    """The text from `done` on in order, cut into (piece, how much it counts)."""
    found, place = [], done
    for start, end in spans:
        found += [(text[place:start], 0.0), (text[start:end], weight)]
        place = end
    return [*found, (text[place:], 0.0)]


def _squeezed(text: str) -> str:
    return "".join(text.split())
