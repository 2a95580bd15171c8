"""Grammars, by llguidance: which tokens may come next, so that an answer as a whole is what a JSON schema allows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

from verl.inference.step_plan import Masks
from verl.utils.resources import available_cores

__all__ = ["AnswerGrammar", "GrammarTokenizer", "check_compiles", "json_grammar", "masks_of", "text_grammar"]

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

    def compile(self, grammar: str) -> AnswerGrammar:
        """The beginning of an answer in this grammar. ValueError: it is none."""
        matcher = _library().LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {matcher.get_error().strip()}")
        return AnswerGrammar(matcher, self._tokens.vocab_size)


def check_compiles(tokenizer: Any, ends: frozenset[int], grammar: str) -> None:
    """Compile a grammar and its first token mask, and discard them. Raises ValueError if the grammar is invalid.

    For a process with limits on time and memory: compiling it again elsewhere costs about the same.
    """
    compiled = _grammar_tokenizer(tokenizer, ends).compile(grammar)
    masks_of([compiled])
    if compiled.error is not None:
        raise ValueError(f"grammar: {compiled.error}")


@lru_cache(1)
def _grammar_tokenizer(tokenizer: Any, ends: frozenset[int]) -> GrammarTokenizer:
    return GrammarTokenizer(tokenizer, ends)


class AnswerGrammar:
    """Where an answer stands in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def copy(self) -> AnswerGrammar:
        """For another answer, from here on."""
        return AnswerGrammar(self._matcher.deep_copy(), self._vocabulary)

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


def masks_of(grammars: Iterable[AnswerGrammar | None]) -> Masks | None:
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
