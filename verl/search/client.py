"""Asking a retriever over HTTP: together, tried again, bounded in time, remembered, left alone while it is down."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from verl.search.breaker import CircuitBreaker
from verl.search.corpus import Document
from verl.search.retriever import Hit
from verl.utils.network import api_headers

__all__ = ["RetrieverClient", "RetrieverError"]

_BACKOFF_S = 0.2
_BATCH = 32
_Key = tuple[str, int | None]


class RetrieverError(Exception):
    """No answer came; the message says why. `refused`: the service is there, and did not take this question."""

    def __init__(self, why: str, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class RetrieverClient:
    """One per event loop. Queries of many callers that wait at the same time travel in one request.

    `concurrent` requests are under way at most; `timeout_s` is how long one may take. `counts`: requests, retries,
    failures (queries without an answer) and remembered (queries that were not asked again).
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        tries: int = 3,
        concurrent: int = 8,
        remembered: int = 4096,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.url = url
        self.counts: Counter[str] = Counter()
        self.breaker = breaker or CircuitBreaker()
        self._tries, self._concurrent, self._most = tries, concurrent, remembered
        self._remembered: OrderedDict[_Key, list[Hit]] = OrderedDict()
        self._under_way: dict[_Key, asyncio.Future[list[Hit]]] = {}
        self._waiting: deque[_Key] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        # The service is named by its address; proxies of the environment are for the outside.
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False, headers=api_headers())

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Hit]]:
        """The best documents of every query; RetrieverError where no answer comes."""
        # Shielded: others may wait for the same query when this caller gives up.
        return list(await asyncio.gather(*(self._answer((query, topk)) for query in queries)))

    async def check(self) -> dict[str, Any]:
        """What the service says of itself; RetrieverError if it is not there."""
        parts = urlsplit(self.url)
        try:
            reply = await self._http.get(urlunsplit((parts.scheme, parts.netloc, "/health", "", "")))
            if reply.status_code == httpx.codes.OK:
                return reply.json()
            # A server of somebody else's may know no /health: it is well if it answers a question.
            await self._ask(["health"], 1)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise RetrieverError(_named(error)) from error
        return {"status": "ok"}

    async def close(self) -> None:
        """Requests under way are dropped, connections end."""
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        for future in self._under_way.values():
            future.cancel()  # of what no sender had taken yet
        self._under_way.clear()
        await self._http.aclose()

    async def _answer(self, key: _Key) -> list[Hit]:
        if key in self._remembered:
            self.counts["remembered"] += 1
            self._remembered.move_to_end(key)
            return self._remembered[key]
        future = self._under_way.get(key)
        if future is None:
            future = self._under_way[key] = asyncio.get_running_loop().create_future()
            self._waiting.append(key)
            if len(self._senders) < self._concurrent:
                sender = asyncio.create_task(self._send())
                self._senders.add(sender)
                sender.add_done_callback(self._senders.discard)
        else:
            self.counts["remembered"] += 1
        return await asyncio.shield(future)

    async def _send(self) -> None:
        """Take what waits, as many of one `topk` as go into a request, until nothing waits."""
        while self._waiting:
            batch = [self._waiting.popleft()]
            while self._waiting and self._waiting[0][1] == batch[0][1] and len(batch) < _BATCH:
                batch.append(self._waiting.popleft())
            await self._settle(batch)

    async def _settle(self, batch: list[_Key]) -> None:
        """Every query of a batch gets its answer or the error; a refusal of several is asked one by one."""
        try:
            answers = await self._fetched([query for query, _ in batch], batch[0][1])
        except RetrieverError as error:
            if error.refused and len(batch) > 1:
                for key in batch:
                    await self._settle([key])
                return
            self.counts["failures"] += len(batch)
            for key in batch:
                future = self._under_way.pop(key)
                future.set_exception(error)
                future.exception()  # looked at, should its caller be gone
            return
        except asyncio.CancelledError:
            for key in batch:
                self._under_way.pop(key).cancel()
            raise
        for key, hits in zip(batch, answers, strict=True):
            self._under_way.pop(key).set_result(hits)
            self._remembered[key] = hits
        while len(self._remembered) > self._most:
            self._remembered.popitem(last=False)

    async def _fetched(self, queries: list[str], topk: int | None) -> list[list[Hit]]:
        for attempt in range(1, self._tries + 1):
            if not self.breaker.allow():
                raise RetrieverError(f"{self.url}: it failed before; asked again in {self.breaker.waits():.0f} s")
            try:
                found = await self._ask(queries, topk)
            except httpx.HTTPError as error:
                self.breaker.failed()
                if attempt == self._tries or isinstance(error, httpx.TimeoutException):
                    raise RetrieverError(f"{self.url}: {_named(error)}") from error
            except RetrieverError:
                self.breaker.succeeded()
                raise
            except asyncio.CancelledError:
                self.breaker.abandoned()
                raise
            except Exception as error:  # a question that cannot be sent
                self.breaker.abandoned()
                raise RetrieverError(f"{self.url}: {_named(error)}", refused=True) from error
            else:
                self.breaker.succeeded()
                return found
            self.counts["retries"] += 1
            await asyncio.sleep(_BACKOFF_S * 2**attempt * random.random())
        raise AssertionError("a try returns or raises")

    async def _ask(self, queries: list[str], topk: int | None) -> list[list[Hit]]:
        self.counts["requests"] += 1
        reply = await self._http.post(self.url, json={"queries": queries, "topk": topk, "return_scores": True})
        if reply.status_code == httpx.codes.TOO_MANY_REQUESTS or reply.is_server_error:
            reply.raise_for_status()
        if reply.is_error:
            raise RetrieverError(f"{self.url}: status {reply.status_code}: {reply.text[:200]}", refused=True)
        try:
            found = [[_read(entry) for entry in entries] for entries in reply.json()["result"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(f"{self.url}: no answer of a retriever: {reply.text[:200]!r}", refused=True) from error
        if len(found) != len(queries):
            raise RetrieverError(f"{self.url}: {len(found)} results for {len(queries)} queries", refused=True)
        return found


def _read(entry: dict[str, Any]) -> Hit:
    """An entry of a result, with or without a score."""
    document = entry.get("document", entry)
    return Hit(Document(str(document["id"]), document["contents"]), float(entry.get("score", 0.0)))


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
