"""A long pass over a corpus: a portion of texts at a time, and how far it has come told in the log now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from verl.search.corpus import Corpus

logger = logging.getLogger(__name__)
T = TypeVar("T")
EVERY_S = 10.0


def reported(portions: Iterable[T], total: int, what: str, size: Callable[[T], int]) -> Iterator[T]:
    """The portions themselves; every ten seconds the log says how many of `total` documents are behind."""
    begin = told = time.monotonic()
    done = 0
    for portion in portions:
        yield portion
        done = min(total, done + size(portion))
        now = time.monotonic()
        if now - told >= EVERY_S:
            told = now
            left = (now - begin) * (total - done) / done
            logger.info("%s: %d of %d documents, about %.0f s left", what, done, total, left)


def portions(corpus: Corpus, size: int) -> Iterator[list[str]]:
    """The texts of a corpus in order, `size` at a time."""
    texts: list[str] = []
    for document in corpus:
        texts.append(document.contents)
        if len(texts) == size:
            yield texts
            texts = []
    if texts:
        yield texts
