"""AnswerRules: what needs a tokenizer in an engine of token ids: requests' stop strings and grammars."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from verl.inference.grammar import AnswerGrammar, GrammarTokenizer
from verl.inference.stop_strings import StopStrings
from verl.types.request import Request, SamplingParams

__all__ = ["AnswerRules"]

# A server may be asked with others every time; the oldest are made again.
_KEPT_STOP_STRINGS = 256
_KEPT_GRAMMARS = 64


class AnswerRules:
    """Made from any thread; the tokenizer is loaded with the first that needs it."""

    def __init__(self, load_tokenizer: Callable[[], Any] | None) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Any = None
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._grammar_tokenizers: dict[frozenset[int], GrammarTokenizer] = {}
        self._grammars: dict[tuple[str, frozenset[int]], AnswerGrammar] = {}
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

    def grammar(self, request: Request) -> AnswerGrammar | None:
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

    def _compiled(self, grammar: str, ends: frozenset[int]) -> AnswerGrammar:
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
