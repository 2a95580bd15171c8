"""Constraints on the output that need a tokenizer: stop strings and grammars."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

from verl.inference.step_plan import TokenMasks
from verl.types.request import Request, SamplingParams
from verl.utils.resources import available_cores

__all__ = [
    "GrammarState",
    "GrammarTokenizer",
    "OutputConstraints",
    "StopStrings",
    "check_compiles",
    "json_grammar",
    "text_grammar",
    "token_masks",
]

# A server may be asked with others every time; the oldest are made again.
_KEPT_STOP_STRINGS = 256
_KEPT_GRAMMARS = 64


class OutputConstraints:
    """Made from any thread; the tokenizer is loaded with the first that needs it."""

    def __init__(self, load_tokenizer: Callable[[], Any] | None) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Any = None
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._grammar_tokenizers: dict[frozenset[int], GrammarTokenizer] = {}
        self._grammars: dict[tuple[str, frozenset[int]], GrammarState] = {}
        self._loading = threading.Lock()
        # Of its own: a grammar may take seconds, and requests with stop strings must not wait for it.
        self._compiling = threading.Lock()

    def stop_check(self, request: Request) -> StopStrings | None:
        """What looks for its stop strings; None: it has none."""
        stop = request.params.stop
        if not stop:
            return None
        if self._load_tokenizer is None:
            raise ValueError(
                f"request {request.id!r}: stop={list(stop)} needs a tokenizer, and this engine has none."
                " Set stop_token_ids instead."
            )
        tokenizer = self._loaded()
        with self._loading:
            if stop not in self._stop_strings:
                if len(self._stop_strings) >= _KEPT_STOP_STRINGS:
                    self._stop_strings.pop(next(iter(self._stop_strings)))  # sequences keep their own
                self._stop_strings[stop] = StopStrings(tokenizer, stop)
            return self._stop_strings[stop]

    def grammar(self, request: Request) -> GrammarState | None:
        """Where its answer begins in its grammar; None: it has none."""
        if request.params.grammar is None:
            return None
        grammar = self._compiled(request.params.grammar, request.params.eos_token_ids).copy()
        for token in request.resume_from.token_ids if request.resume_from else ():
            grammar.accept(token)
        return grammar

    def prepare(self, params: SamplingParams) -> None:
        """Compile a grammar ahead of requests with it."""
        if params.grammar is not None:
            self._compiled(params.grammar, params.eos_token_ids)

    def _compiled(self, grammar: str, ends: frozenset[int]) -> GrammarState:
        if self._load_tokenizer is None:
            raise ValueError("a grammar needs a tokenizer, and this engine has none. Leave it out.")
        known = self._grammars.get((grammar, ends))
        if known is not None:
            return known
        tokenizer = self._loaded()
        with self._compiling:
            if ends not in self._grammar_tokenizers:
                self._grammar_tokenizers[ends] = GrammarTokenizer(tokenizer, ends)
            if (grammar, ends) not in self._grammars:
                if len(self._grammars) >= _KEPT_GRAMMARS:
                    self._grammars.pop(next(iter(self._grammars)))  # sequences keep their own
                self._grammars[grammar, ends] = self._grammar_tokenizers[ends].compile(grammar)
            return self._grammars[grammar, ends]

    def _loaded(self) -> Any:
        """The tokenizer."""
        assert self._load_tokenizer is not None
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer


# What a decoder writes for bytes that are no whole character.
_BROKEN = "\ufffd"
# A token that stands for one byte: a run of them is decoded as a whole, or not at all where it is no text.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StopStrings:
    """Looks for some strings in generated text. Holds nothing of a sequence: one object serves all with these strings.

    Most tokens cannot complete a string, since they do not hold its last character; that is looked up. Only for the
    others the last few tokens are decoded.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # A token is a byte at least. One token more in front: decoders treat the first one of a text differently.
        self._window = max(len(text.encode()) for text in stop) + 1
        self._may_complete: dict[int, bool] = {}
        self._byte: dict[int, bool] = {}

    def completed_by_last(self, token_ids: list[int]) -> bool:
        """Whether the last of the generated `token_ids` completes one of the strings."""
        last = token_ids[-1]
        possible = self._may_complete.get(last)
        if possible is None:
            possible = self._may_complete[last] = self._holds_an_end(last)
        if not possible:
            return False
        start = max(0, len(token_ids) - self._window)
        while start and self._is_byte(token_ids[start]):
            start -= 1
        window = token_ids[start:]
        text = self._decode(window)
        if not any(stop in text for stop in self._stop):
            return False
        # One that was there before (when the answer was still too short to end) is not completed now.
        before = self._decode(window[:-1])
        return any(text.rfind(stop) > before.rfind(stop) for stop in self._stop)

    def _holds_an_end(self, token: int) -> bool:
        text = self._decode([token])
        if _BROKEN in text:
            return True
        # A space at a token's edge may be missing when it is decoded alone.
        return any(stop[-1] in text or stop[-1].isspace() for stop in self._stop)

    def _is_byte(self, token: int) -> bool:
        found = self._byte.get(token)
        if found is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            found = self._byte[token] = isinstance(name, str) and _BYTE.fullmatch(name) is not None
        return found

    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens count: their text may be the string that ends an answer.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# A model that is not sure goes on with white space for ever, if it may.
_OPTIONS = {"whitespace_pattern": r" ?|\r?\n[ \t]{0,24}"}
_ABSENT = "a grammar needs the package llguidance, which is not installed here: pip install llguidance"

_UNSUPPORTED_TOKENIZER = (
    "constrained output (response_format, strict tools) needs a fast tokenizer with a byte-level or byte-fallback"
    " decoder, which maps each token to bytes; the tokenizer of this model has none"
)
_REMEDY = (
    "Leave it out and describe the format in the prompt, or serve a model whose tokenizer.json has such a decoder."
)


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of the JSON texts that a schema describes. ValueError: it cannot be one."""
    return _checked(_library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS))


def text_grammar(choices: Sequence[Sequence[str | dict[str, Any]]]) -> str:
    """One of these choices: each a row of texts, as they stand, and of schemas, each for a JSON text."""
    rows = []
    for choice in choices:
        parts = [
            json.dumps(part, ensure_ascii=False)
            if isinstance(part, str)
            else f"%json {json.dumps({**part, 'x-guidance': _OPTIONS})}"
            for part in choice
        ]
        rows.append(" ".join(parts))
    return _checked(_library().LLMatcher.grammar_from_lark(f"start: {' | '.join(rows)}"))


def _checked(grammar: str) -> str:
    problem = _library().LLMatcher.validate_grammar(grammar)
    if problem:
        raise ValueError(problem.strip())
    return grammar


class GrammarTokenizer:
    """A tokenizer as grammars read it; `ends` are the tokens that end an answer.

    Raises ValueError for a tokenizer that llguidance does not support.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        _library()
        import llguidance.hf

        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer, eos_token=sorted(ends) or None)
        except ValueError as error:
            raise ValueError(f"{_UNSUPPORTED_TOKENIZER} ({error}). {_REMEDY}") from error

    def compile(self, grammar: str) -> GrammarState:
        """The beginning of an answer in this grammar. ValueError: it is none."""
        matcher = _library().LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {matcher.get_error().strip()}")
        return GrammarState(matcher, self._tokens.vocab_size)


def check_compiles(tokenizer: Any, ends: frozenset[int], grammar: str) -> None:
    """Compile a grammar and its first token mask, and discard them. Raises ValueError if the grammar is invalid.

    For a process with limits on time and memory: compiling it again elsewhere costs about the same.
    """
    compiled = _grammar_tokenizer(tokenizer, ends).compile(grammar)
    token_masks([compiled])
    if compiled.error is not None:
        raise ValueError(f"grammar: {compiled.error}")


@lru_cache(1)
def _grammar_tokenizer(tokenizer: Any, ends: frozenset[int]) -> GrammarTokenizer:
    return GrammarTokenizer(tokenizer, ends)


class GrammarState:
    """Where an answer stands in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def copy(self) -> GrammarState:
        """For another answer, from here on."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)

    def accept(self, token: int) -> None:
        """The token came."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why it cannot be gone on with: a token that is not allowed, or a limit of the library."""
        return self._matcher.get_error().strip().partition("\n")[0] if self._matcher.is_error() else None


def token_masks(grammars: Iterable[GrammarState | None]) -> TokenMasks | None:
    """Which tokens may come next in the rows that have a grammar; None: no row has one.

    All cores look at once: a mask takes microseconds, but milliseconds where a text is unusual.
    """
    import llguidance.numpy
    import numpy as np

    placed = [(row, grammar) for row, grammar in enumerate(grammars) if grammar is not None]
    if not placed:
        return None
    words = np.zeros(llguidance.numpy.get_bitmask_shape(len(placed), placed[0][1]._vocabulary), np.int32)
    matchers = [(grammar._matcher, number) for number, (_, grammar) in enumerate(placed)]
    llguidance.numpy.fill_next_token_bitmask_par(_threads(), matchers, words)
    return [row for row, _ in placed], words


@cache
def _threads() -> Any:
    return _library().LLExecutor(available_cores())


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ValueError(f"{_ABSENT}.") from error
    return llguidance
