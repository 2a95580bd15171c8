"""Searcher: the retriever of a search agent, a service over HTTP or an index in this process."""

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

__all__ = ["NO_RESULTS", "LocalSearcher", "Searcher", "check_retriever", "format_documents", "open_searcher"]

logger = logging.getLogger(__name__)

# Text for the model instead of an empty list of documents.
NO_RESULTS = "Nothing was found."


class Searcher(Protocol):
    """Use each instance in one event loop only."""

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Hit]]:
        """The best documents of every query; RetrieverError if a query fails."""
        ...

    async def check(self) -> dict[str, Any]:
        """Status, and the number of documents if it is known; RetrieverError if the retriever does not respond."""
        ...

    async def close(self) -> None:
        """Release connections or threads."""
        ...


class LocalSearcher:
    """A retriever in a thread of this process."""

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
        """Status and number of documents."""
        return {"status": "ok", "documents": len(self._retriever.corpus)}

    async def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False)


def open_searcher(config: RetrieverConfig) -> Searcher:
    """The service at `retriever.url`; if it is not set, a BM25 index of `retriever.corpus_path` in this process."""
    if config.url:
        return RetrieverClient(config.url, timeout_s=config.timeout)
    assert config.corpus_path is not None, "validated: url or corpus_path is set"
    return LocalSearcher(open_retriever(config.corpus_path, topk=config.topk))


def check_retriever(config: RetrieverConfig) -> None:
    """Check the retriever before models are loaded, and log what it searches. Builds the index of a local corpus."""
    try:
        status = asyncio.run(_check(config))
    except RetrieverError as error:
        raise ValueError(
            f"retriever.url: no search service responds at {config.url} ({error}). Start it: python -m "
            "verl.search.server --corpus_path corpus.jsonl --port 8000. Or search inside the run: "
            "retriever.corpus_path=corpus.jsonl."
        ) from error
    documents = f"{status['documents']} documents" if "documents" in status else "a search service"
    logger.info("search: %s at %s", documents, config.url or config.corpus_path)


def format_documents(hits: Sequence[Hit]) -> str:
    """Format documents for a model: `Doc 1(Title: …) text`, one per line."""
    parts = (title_and_text(hit.document.contents) for hit in hits)
    return "".join(f"Doc {number}(Title: {title}) {text}\n" for number, (title, text) in enumerate(parts, 1))


async def _check(config: RetrieverConfig) -> dict[str, Any]:
    searcher = open_searcher(config)
    try:
        return await searcher.check()
    finally:
        await searcher.close()
