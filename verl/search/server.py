"""`python -m verl.search.server --corpus_path FILE`: an HTTP server for search agents.

POST /retrieve {"queries": [text], "topk": number | null, "return_scores": bool}
-> {"result": [[{"document": {"id", "contents"}, "score"}]]}, without scores {"result": [[{"id", "contents"}]]}
GET /health -> {"status": "ok", "documents": number, …}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from verl.search.request import RetrieveRequest, check_response_size
from verl.search.retriever import DEFAULT_TOPK, RETRIEVERS, Hit, QueryLimit, Retriever, open_retriever
from verl.utils.http_server import add_server_options, positive
from verl.utils.http_server.app import HttpError, create_app, request_body
from verl.utils.http_server.json_body import BodyParser
from verl.utils.http_server.server import (
    ConnectionLimits,
    bind_socket,
    create_server,
    run_event_loop,
    warn_if_public,
)
from verl.utils.logging_setup import setup_logging
from verl.utils.resources import use_single_heap

__all__ = ["SearchServer", "main"]

DEFAULT_PORT = 8000
_MAX_BATCH = 256
MAX_WAITING = 8192
_Waiting = tuple[list[str], int, "asyncio.Future[list[list[Hit]]]"]

logger = logging.getLogger("verl.search.server")  # not "__main__", which is outside the one logging setup


class SearchServer:
    """Serves a retriever. Queries that arrive during a search are searched together in the next batch."""

    def __init__(self, retriever: Retriever, name: str) -> None:
        self._retriever, self._name = retriever, name
        self._parser = BodyParser(RetrieveRequest)
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._search_task: asyncio.Task[None] | None = None
        self._query_count = 0

    def app(self, max_body_bytes: int, api_key: str | None = None) -> ASGIApp:
        routes = [Route("/retrieve", self._retrieve, methods=["POST"])]
        return create_app(routes, health=self._health, max_body_bytes=max_body_bytes, api_key=api_key)

    def close(self) -> None:
        self._parser.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _health(self) -> dict[str, Any]:
        fields = {"retriever": self._name, "documents": len(self._retriever.corpus), "topk": self._retriever.topk}
        return {"status": "ok", **fields, "queries": self._query_count}

    async def _retrieve(self, request: Request) -> Response:
        query = await self._parser.parse(RetrieveRequest, request_body(request))
        topk = query.topk or self._retriever.topk
        try:
            check_response_size(query.queries, topk)
        except QueryLimit as error:
            raise HttpError(422, f"{error}.", param="queries") from error
        results = await self.search(query.queries, topk)
        self._query_count += len(query.queries)
        return StreamingResponse(_response_chunks(results, query.return_scores), media_type="application/json")

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        if sum(len(waiting) for waiting, _, _ in self._waiting) > MAX_WAITING:
            raise HttpError(503, "too many queries are waiting. Try again later.")
        future: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((queries, topk, future))
        if self._search_task is None:
            self._search_task = asyncio.create_task(self._search_waiting())
        return await future

    async def _search_waiting(self) -> None:
        """Search waiting queries in batches with the same `topk` until none is waiting."""
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            queries = [query for batched, _, _ in batch for query in batched]
            try:
                results = iter(await loop.run_in_executor(self._thread, self._retriever.retrieve, queries, batch[0][1]))
            except Exception as error:  # noqa: BLE001 - raised by every request of the batch
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for batched, _, future in batch:
                hits_by_query = [next(results) for _ in batched]
                if not future.done():  # otherwise its client has disconnected
                    future.set_result(hits_by_query)
        self._search_task = None

    def _next_batch(self) -> list[_Waiting]:
        """The next requests with the same `topk`, without those of disconnected clients."""
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and size < _MAX_BATCH and (not batch or self._waiting[0][1] == batch[0][1]):
            queries, topk, future = self._waiting.popleft()
            if not future.done():
                batch.append((queries, topk, future))
                size += len(queries)
        return batch


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; exit code 2 if the server cannot start with these options."""
    options = _parser().parse_args(arguments)
    setup_logging()
    use_single_heap()
    try:
        _serve(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _serve(options: argparse.Namespace) -> None:
    with bind_socket(options.host, options.port) as bound:
        if options.api_key is None:
            warn_if_public(bound, "Set --api-key (or VERL_API_KEY), or leave out --host.")
        retriever = open_retriever(
            options.corpus_path,
            options.retriever_name,
            options.topk,
            index_path=options.index_path,
            model=options.retriever_model,
            faiss_gpu=options.faiss_gpu,
        )
        name = f"{len(retriever.corpus)} documents ({options.retriever_name})"
        limits = ConnectionLimits(connections=options.max_connections)
        with contextlib.closing(SearchServer(retriever, options.retriever_name)) as server:
            app = server.app(options.max_body_mb * 2**20, options.api_key)
            run_event_loop(create_server(app, name, limits, "/retrieve").serve([bound]))


async def _response_chunks(results: list[list[Hit]], scores: bool) -> AsyncIterator[str]:
    """The response body, in one chunk per query so that other requests can run in between."""
    yield '{"result": ['
    for number, hits in enumerate(results):
        yield f"{', ' if number else ''}{json.dumps([_hit_as_dict(hit, scores) for hit in hits], ensure_ascii=False)}"
        await asyncio.sleep(0)
    yield "]}"


def _hit_as_dict(hit: Hit, scores: bool) -> dict[str, Any]:
    document = hit.document._asdict()
    return {"document": document, "score": hit.score} if scores else document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verl.search.server", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--corpus_path", required=True, help='JSON lines of {"id", "contents"}')
    add("--retriever_name", default="bm25", choices=RETRIEVERS, help="(default: %(default)s)")
    add("--index_path", help="folder for the index (default: the cache), or a faiss file of another program")
    add(
        "--topk",
        type=positive,
        default=DEFAULT_TOPK,
        help="documents per query if a request does not set topk (default: 3)",
    )
    add("--retriever_model", help="dense: a sentence-transformers folder or hub name")
    add("--faiss_gpu", action="store_true", help="dense: search on GPUs, if faiss supports them")
    add_server_options(parser, DEFAULT_PORT, max_body_mb=8)
    return parser


if __name__ == "__main__":
    sys.exit(main())
