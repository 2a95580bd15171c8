"""Searcher: the retriever of a search agent, a service over HTTP or an index in this process.

`RetrieverClient` queries a service with batching, retries, a timeout, a cache and a circuit breaker.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import httpx

from verl.config import RetrieverConfig
from verl.search.corpus import Document, title_and_text
from verl.search.retriever import Hit, QueryLimit, Retriever, check_queries, open_retriever
from verl.utils.network import api_headers

__all__ = [
    "NO_RESULTS",
    "CircuitBreaker",
    "LocalSearcher",
    "RetrieverClient",
    "RetrieverError",
    "Searcher",
    "check_retriever",
    "format_documents",
    "open_searcher",
]

logger = logging.getLogger(__name__)

_BACKOFF_S = 0.2
_MAX_BATCH = 32
_MAX_ATTEMPTS, _MAX_CONCURRENT_REQUESTS = 3, 8
_Key = tuple[str, int | None]


class RetrieverError(Exception):
    """A query failed. `refused`: the service responded and rejected this request."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class RetrieverClient:
    """Client of a retriever service; use one per event loop. Queries that wait at the same time are batched into one
    request.

    At most eight requests run at a time, each for at most `timeout_s`. A request is sent up to three times if the
    connection or the service fails; after a timeout it is not repeated. The results of `cache_size` queries
    are cached. `counts`: requests, retries, failures (queries without a result) and cached (queries that needed no
    request of their own).
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        cache_size: int = 4096,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.url = url
        self.counts: Counter[str] = Counter()
        self.breaker = breaker or CircuitBreaker()
        self._cache_size = cache_size
        self._cache: OrderedDict[_Key, list[Hit]] = OrderedDict()
        self._futures: dict[_Key, asyncio.Future[list[Hit]]] = {}  # by query without a result so far
        self._queue: deque[_Key] = deque()  # queries that are not in a request yet
        self._senders: set[asyncio.Task[None]] = set()
        # Proxies of the environment are not used: the service is usually in the local network.
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False, headers=api_headers())

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Hit]]:
        """Return the best documents of every query; raise RetrieverError if a query fails."""
        return list(await asyncio.gather(*(self._result((query, topk)) for query in queries)))

    async def check(self) -> dict[str, Any]:
        """Return the response of the service's /health; raise RetrieverError if the service does not respond."""
        url_parts = urlsplit(self.url)
        try:
            response = await self._http.get(urlunsplit((url_parts.scheme, url_parts.netloc, "/health", "", "")))
            if response.status_code == httpx.codes.OK:
                return response.json()
            # Third-party servers may have no /health: try a query.
            await self._request(["health"], 1)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise RetrieverError(_describe(error)) from error
        return {"status": "ok"}

    async def close(self) -> None:
        """Cancel running requests and close the connections."""
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        for future in self._futures.values():
            future.cancel()  # queries that no sender has taken yet
        self._futures.clear()
        await self._http.aclose()

    async def _result(self, key: _Key) -> list[Hit]:
        if key in self._cache:
            self.counts["cached"] += 1
            self._cache.move_to_end(key)
            return self._cache[key]
        future = self._futures.get(key)
        if future is None:
            future = self._futures[key] = asyncio.get_running_loop().create_future()
            self._queue.append(key)
            if len(self._senders) < _MAX_CONCURRENT_REQUESTS:
                sender = asyncio.create_task(self._send())
                self._senders.add(sender)
                sender.add_done_callback(self._senders.discard)
        else:
            self.counts["cached"] += 1
        return await asyncio.shield(future)  # other callers may wait for the same query

    async def _send(self) -> None:
        """Send queued queries in batches with the same `topk` until the queue is empty."""
        while self._queue:
            batch = [self._queue.popleft()]
            while self._queue and self._queue[0][1] == batch[0][1] and len(batch) < _MAX_BATCH:
                batch.append(self._queue.popleft())
            await self._send_batch(batch)

    async def _send_batch(self, batch: list[_Key]) -> None:
        """Set the result or error of every query of a batch. If the service rejects the batch, its queries are sent one
        by one."""
        try:
            results = await self._request_with_retries([query for query, _ in batch], batch[0][1])
        except RetrieverError as error:
            if error.refused and len(batch) > 1:
                for key in batch:
                    await self._send_batch([key])
                return
            self.counts["failures"] += len(batch)
            for key in batch:
                future = self._futures.pop(key)
                future.set_exception(error)
                future.exception()  # marks it as retrieved, in case the caller is gone
            return
        except asyncio.CancelledError:
            for key in batch:
                self._futures.pop(key).cancel()
            raise
        for key, hits in zip(batch, results, strict=True):
            self._futures.pop(key).set_result(hits)
            self._cache[key] = hits
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    async def _request_with_retries(self, queries: list[str], topk: int | None) -> list[list[Hit]]:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if not self.breaker.allow():
                raise RetrieverError(
                    f"{self.url}: circuit breaker open after repeated failures;"
                    f" next attempt in {self.breaker.wait_s():.0f} s"
                )
            try:
                results = await self._request(queries, topk)
            except httpx.HTTPError as error:
                self.breaker.failed()
                if attempt == _MAX_ATTEMPTS or isinstance(error, httpx.TimeoutException):
                    raise RetrieverError(f"{self.url}: {_describe(error)}") from error
            except RetrieverError:
                self.breaker.succeeded()  # the service responded, so it is up, although it rejected this request
                raise
            except asyncio.CancelledError:
                self.breaker.abandoned()
                raise
            except Exception as error:  # a query that cannot be sent
                self.breaker.abandoned()
                raise RetrieverError(f"{self.url}: {_describe(error)}", refused=True) from error
            else:
                self.breaker.succeeded()
                return results
            self.counts["retries"] += 1
            await asyncio.sleep(_BACKOFF_S * 2**attempt * random.random())
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _request(self, queries: list[str], topk: int | None) -> list[list[Hit]]:
        self.counts["requests"] += 1
        response = await self._http.post(self.url, json={"queries": queries, "topk": topk, "return_scores": True})
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error:
            response.raise_for_status()
        if response.is_error:
            raise RetrieverError(f"{self.url}: status {response.status_code}: {response.text[:200]}", refused=True)
        try:
            results = [[_parse_hit(entry) for entry in entries] for entries in response.json()["result"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(
                f"{self.url}: not the response of a retriever: {response.text[:200]!r}", refused=True
            ) from error
        if len(results) != len(queries):
            raise RetrieverError(f"{self.url}: {len(results)} results for {len(queries)} queries", refused=True)
        return results


def _parse_hit(entry: dict[str, Any]) -> Hit:
    """Return the hit of an entry of the response, with or without a score."""
    document = entry.get("document", entry)
    return Hit(Document(str(document["id"]), document["contents"]), float(entry.get("score", 0.0)))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class CircuitBreaker:
    """Stops requests to a failing service.

    States: closed (all requests are allowed), open after `failures` failures in a row (no request is allowed), and
    half-open after `cooldown_s` (one probe request is allowed; its result closes or reopens the breaker).

    Call `allow` before a request, and then `succeeded`, `failed`, or `abandoned` if the request has no outcome.
    """

    def __init__(self, failures: int = 5, cooldown_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._cooldown, self._clock = failures, cooldown_s, clock
        self._consecutive_failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> str:
        """closed, open or half-open."""
        if self._opened_at is None:
            return "closed"
        return "half-open" if self._probing or self.wait_s() == 0 else "open"

    def wait_s(self) -> float:
        """Seconds until the next request is allowed."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self._cooldown - self._clock())

    def allow(self) -> bool:
        """Whether a request may be sent; in the half-open state only one at a time."""
        if self._opened_at is None:
            return True
        if self._probing or self.wait_s() > 0:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The request succeeded: close the breaker."""
        self._consecutive_failures, self._opened_at, self._probing = 0, None, False

    def failed(self) -> None:
        """The request failed. A failed probe restarts the cool-down."""
        self._consecutive_failures += 1
        if self._probing or (self._opened_at is None and self._consecutive_failures >= self._limit):
            self._opened_at = self._clock()
        self._probing = False

    def abandoned(self) -> None:
        """The request ended without an outcome: the next one may probe."""
        self._probing = False


# Text for the model instead of an empty list of documents.
NO_RESULTS = "Nothing was found."


class Searcher(Protocol):
    """Searches documents. Use each instance in one event loop only."""

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
