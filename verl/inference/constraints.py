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
    "StopStringChecker",
    "check_compiles",
    "json_grammar",
    "text_grammar",
    "token_masks",
]

# Bounds of the caches: clients of a server may send new strings and grammars with every request.
_MAX_CACHED_STOP_STRINGS = 256
_MAX_CACHED_GRAMMARS = 64


class OutputConstraints:
    """Creates and caches the stop checks and grammars of requests; loads the tokenizer on first use. Thread-safe."""

    def __init__(self, load_tokenizer: Callable[[], Any] | None) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Any = None
        self._stop_strings: dict[tuple[str, ...], StopStringChecker] = {}
        self._grammar_tokenizers: dict[frozenset[int], GrammarTokenizer] = {}
        self._grammars: dict[tuple[str, frozenset[int]], GrammarState] = {}
        self._loading = threading.Lock()
        # A separate lock: compiling may take seconds, and requests with stop strings must not wait for it.
        self._compiling = threading.Lock()

    def stop_check(self, request: Request) -> StopStringChecker | None:
        """The stop check of a request; None if it has no stop strings."""
        stop = request.params.stop
        if not stop:
            return None
        if self._load_tokenizer is None:
            raise ValueError(
                f"request {request.id!r}: stop={list(stop)} needs a tokenizer, but this engine has none."
                " Set stop_token_ids instead."
            )
        tokenizer = self._get_tokenizer()
        with self._loading:
            if stop not in self._stop_strings:
                if len(self._stop_strings) >= _MAX_CACHED_STOP_STRINGS:
                    self._stop_strings.pop(next(iter(self._stop_strings)))  # running sequences keep their reference
                self._stop_strings[stop] = StopStringChecker(tokenizer, stop)
            return self._stop_strings[stop]

    def grammar(self, request: Request) -> GrammarState | None:
        """The grammar state of a request, advanced by the tokens it resumes from; None if it has no grammar."""
        if request.params.grammar is None:
            return None
        grammar = self._compile(request.params.grammar, request.params.eos_token_ids).copy()
        for token in request.resume_from.token_ids if request.resume_from else ():
            grammar.accept(token)
        return grammar

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of `params` before requests use it."""
        if params.grammar is not None:
            self._compile(params.grammar, params.eos_token_ids)

    def _compile(self, grammar: str, end_token_ids: frozenset[int]) -> GrammarState:
        if self._load_tokenizer is None:
            raise ValueError("grammar: needs a tokenizer, but this engine has none. Remove it.")
        compiled = self._grammars.get((grammar, end_token_ids))
        if compiled is not None:
            return compiled
        tokenizer = self._get_tokenizer()
        with self._compiling:
            if end_token_ids not in self._grammar_tokenizers:
                self._grammar_tokenizers[end_token_ids] = GrammarTokenizer(tokenizer, end_token_ids)
            if (grammar, end_token_ids) not in self._grammars:
                if len(self._grammars) >= _MAX_CACHED_GRAMMARS:
                    self._grammars.pop(next(iter(self._grammars)))  # running sequences keep their reference
                self._grammars[grammar, end_token_ids] = self._grammar_tokenizers[end_token_ids].compile(grammar)
            return self._grammars[grammar, end_token_ids]

    def _get_tokenizer(self) -> Any:
        assert self._load_tokenizer is not None
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer


# Decoders output this character for an incomplete one.
_REPLACEMENT = "\ufffd"
# Name of a token that stands for one byte. Decoders convert consecutive byte tokens together; if these are not valid
# UTF-8, all of them become replacement characters.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StopStringChecker:
    """Finds the token that completes a stop string, also if the string spans tokens or splits a character.

    Stateless with respect to sequences: one object serves all requests with these strings. Most tokens cannot complete
    a string because they do not contain its last character; this is cached per token. Only if a token may complete one,
    the last few tokens are decoded.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # A token is at least a byte. One more token in front: decoders treat the first token of a text differently.
        self._window = max(len(text.encode()) for text in stop) + 1
        self._may_complete: dict[int, bool] = {}
        self._is_byte_by_token: dict[int, bool] = {}

    def completed_by_last(self, token_ids: list[int]) -> bool:
        """Whether the last of the generated `token_ids` completes one of the strings."""
        last = token_ids[-1]
        possible = self._may_complete.get(last)
        if possible is None:
            possible = self._may_complete[last] = self._contains_last_character(last)
        if not possible:
            return False
        start = max(0, len(token_ids) - self._window)
        while start and self._is_byte_token(token_ids[start]):
            start -= 1
        window = token_ids[start:]
        text = self._decode(window)
        if not any(stop in text for stop in self._stop):
            return False
        # A string completed earlier (below min_new_tokens) does not count.
        before = self._decode(window[:-1])
        return any(text.rfind(stop) > before.rfind(stop) for stop in self._stop)

    def _contains_last_character(self, token: int) -> bool:
        text = self._decode([token])
        if _REPLACEMENT in text:
            return True
        # A space at a token's edge may be missing when it is decoded alone.
        return any(stop[-1] in text or stop[-1].isspace() for stop in self._stop)

    def _is_byte_token(self, token: int) -> bool:
        is_byte = self._is_byte_by_token.get(token)
        if is_byte is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            is_byte = self._is_byte_by_token[token] = isinstance(name, str) and _BYTE_TOKEN.fullmatch(name) is not None
        return is_byte

    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens are included: a stop string may be one.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# Limits white space: otherwise a model may generate it without end.
_JSON_OPTIONS = {"whitespace_pattern": r" ?|\r?\n[ \t]{0,24}"}
_NOT_INSTALLED = "grammar: needs the package llguidance, which is not installed: pip install llguidance"

_UNSUPPORTED_TOKENIZER = (
    "constrained output (response_format, strict tools) needs a fast tokenizer with a byte-level or byte-fallback"
    " decoder, which maps each token to bytes; the tokenizer of this model has none"
)
_REMEDY = "Remove it and describe the format in the prompt, or serve a model whose tokenizer.json has such a decoder."


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON texts that match `schema`. Raises ValueError for an unsupported schema."""
    return _validated(_library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS))


def text_grammar(choices: Sequence[Sequence[str | dict[str, Any]]]) -> str:
    """The grammar of one of `choices`, each a sequence of literal texts (str) and JSON schemas (dict)."""
    rows = []
    for choice in choices:
        parts = [
            json.dumps(part, ensure_ascii=False)
            if isinstance(part, str)
            else f"%json {json.dumps({**part, 'x-guidance': _JSON_OPTIONS})}"
            for part in choice
        ]
        rows.append(" ".join(parts))
    return _validated(_library().LLMatcher.grammar_from_lark(f"start: {' | '.join(rows)}"))


def _validated(grammar: str) -> str:
    problem = _library().LLMatcher.validate_grammar(grammar)
    if problem:
        raise ValueError(problem.strip())
    return grammar


class GrammarTokenizer:
    """A tokenizer in llguidance's form.

    Raises ValueError for a tokenizer that llguidance does not support.
    """

    def __init__(self, tokenizer: Any, end_token_ids: frozenset[int]) -> None:
        _library()
        import llguidance.hf

        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer, eos_token=sorted(end_token_ids) or None)
        except ValueError as error:
            raise ValueError(f"{_UNSUPPORTED_TOKENIZER} ({error}). {_REMEDY}") from error

    def compile(self, grammar: str) -> GrammarState:
        """Compile a grammar to its initial state. Raises ValueError if it is invalid."""
        matcher = _library().LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {matcher.get_error().strip()}")
        return GrammarState(matcher, self._tokens.vocab_size)


def check_compiles(tokenizer: Any, end_token_ids: frozenset[int], grammar: str) -> None:
    """Compile a grammar and its first token mask, and discard them. Raises ValueError if the grammar is invalid.

    For processes with limits on time and memory: compiling it again in the engine costs about the same.
    """
    compiled = _grammar_tokenizer(tokenizer, end_token_ids).compile(grammar)
    token_masks([compiled])
    if compiled.error is not None:
        raise ValueError(f"grammar: {compiled.error}")


@lru_cache(1)
def _grammar_tokenizer(tokenizer: Any, end_token_ids: frozenset[int]) -> GrammarTokenizer:
    return GrammarTokenizer(tokenizer, end_token_ids)


class GrammarState:
    """State of a grammar after the tokens so far."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def copy(self) -> GrammarState:
        """An independent copy of the state."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the output is complete: no token may follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the state is invalid: a forbidden token, or a limit of llguidance. None if it is valid."""
        return self._matcher.get_error().strip().partition("\n")[0] if self._matcher.is_error() else None


def token_masks(grammars: Iterable[GrammarState | None]) -> TokenMasks | None:
    """Allowed next tokens of the rows with a grammar; None if no row has one.

    Computed on all cores: a mask usually takes microseconds, but sometimes milliseconds.
    """
    import llguidance.numpy
    import numpy as np

    constrained = [(row, grammar) for row, grammar in enumerate(grammars) if grammar is not None]
    if not constrained:
        return None
    words = np.zeros(llguidance.numpy.get_bitmask_shape(len(constrained), constrained[0][1]._vocabulary), np.int32)
    matchers = [(grammar._matcher, number) for number, (_, grammar) in enumerate(constrained)]
    llguidance.numpy.fill_next_token_bitmask_par(_executor(), matchers, words)
    return [row for row, _ in constrained], words


@cache
def _executor() -> Any:
    return _library().LLExecutor(available_cores())


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise ValueError(f"{_NOT_INSTALLED}.") from error
    return llguidance
