"""What a search agent asks: a service over HTTP, or a retriever in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from verl.config import RetrieverConfig
from verl.search.client import RetrieverClient, RetrieverError
from verl.search.corpus import title_and_text
from verl.search.retriever import Hit, QueryLimit, Retriever, check_queries, open_retriever

__all__ = ["LocalSearcher", "Searcher", "as_information", "check_retriever", "open_searcher"]

logger = logging.getLogger(__name__)


class Searcher(Protocol):
    """Belongs to one event loop."""

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Hit]]:
        """The best documents of every query; RetrieverError where no answer comes."""
        ...

    async def check(self) -> dict[str, Any]:
        """What it says of itself; RetrieverError if it does not answer."""
        ...

    async def close(self) -> None:
        """Nothing is asked any more."""
        ...


class LocalSearcher:
    """A retriever in this process, in a thread of its own."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Hit]]:
        """The best documents of every query; RetrieverError for a query beyond the retriever's limits."""
        try:
            check_queries(queries, topk)
        except QueryLimit as error:
            raise RetrieverError(str(error), refused=True) from error
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._retriever.retrieve, queries, topk)

    async def check(self) -> dict[str, Any]:
        """How many documents there are."""
        return {"status": "ok", "documents": len(self._retriever.corpus)}

    async def close(self) -> None:
        """The thread ends."""
        self._thread.shutdown(wait=False)


def open_searcher(config: RetrieverConfig) -> Searcher:
    """The service at `retriever.url`; without one BM25 on `retriever.corpus_path`, in this process."""
    if config.url:
        return RetrieverClient(config.url, timeout_s=config.timeout)
    assert config.corpus_path is not None, "the rules of the configuration want one of the two"
    return LocalSearcher(open_retriever(config.corpus_path, topk=config.topk))


def check_retriever(config: RetrieverConfig) -> None:
    """Ask once, before anything is loaded, and tell what answers. Builds the index of a local corpus."""
    try:
        facts = asyncio.run(_check(config))
    except RetrieverError as error:
        raise ValueError(
            f"retriever.url: nothing that searches answers at {config.url} ({error}). Start it: python -m "
            "verl.search.server --corpus_path corpus.jsonl --port 8000. Or search in the run itself: "
            "retriever.corpus_path=corpus.jsonl."
        ) from error
    documents = f"{facts['documents']} documents" if "documents" in facts else "a search service"
    logger.info("search: %s at %s", documents, config.url or config.corpus_path)


def as_information(hits: Sequence[Hit]) -> str:
    """Documents as a model reads them: `Doc 1(Title: …) text`, a line each."""
    parts = (title_and_text(hit.document.contents) for hit in hits)
    return "".join(f"Doc {number}(Title: {title}) {text}\n" for number, (title, text) in enumerate(parts, 1))


async def _check(config: RetrieverConfig) -> dict[str, Any]:
    searcher = open_searcher(config)
    try:
        return await searcher.check()
    finally:
        await searcher.close()
