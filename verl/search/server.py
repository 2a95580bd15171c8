"""`python -m verl.search.server --corpus_path FILE`: a retriever behind HTTP, as search agents ask for it.

POST /retrieve {"queries": [text], "topk": number | null, "return_scores": bool}
-> {"result": [[{"document": {"id", "contents"}, "score"}]]}, without scores {"result": [[{"id", "contents"}]]}
GET /health -> {"status": "ok", "documents": number, …}
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.search.retriever import DEFAULT_TOPK, RETRIEVERS, Hit, Retriever, open_retriever
from verl.utils.http_server.asgi import HttpError, JsonApp
from verl.utils.http_server.protocol import Limits, asgi_server, bound, warn_if_open
from verl.utils.logging_setup import setup_logging

__all__ = ["SearchApp", "main"]

DEFAULT_PORT = 8000
MAX_TOPK = 1000
_BATCH = 256
_Waiting = tuple[list[str], int, "asyncio.Future[list[list[Hit]]]"]

logger = logging.getLogger("verl.search.server")  # not "__main__", which is outside the one logging setup


class SearchApp(JsonApp):
    """The ASGI app. Queries that come while others are looked up wait and are looked up together."""

    def __init__(self, retriever: Retriever, name: str, max_body: int, max_queries: int = 1024) -> None:
        super().__init__({("POST", "/retrieve"): self._retrieve, ("GET", "/health"): self._health}, max_body)
        self._retriever, self._name, self._max_queries = retriever, name, max_queries
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._looking: asyncio.Task[None] | None = None
        self._answered = 0

    async def _health(self, _: Any) -> dict[str, Any]:
        facts = {"retriever": self._name, "documents": len(self._retriever.corpus), "topk": self._retriever.topk}
        return {"status": "ok", **facts, "queries": self._answered}

    async def _retrieve(self, given: Any) -> dict[str, Any]:
        queries, topk, scores = self._read(given)
        found = await self._look_up(queries, topk)
        self._answered += len(queries)
        return {"result": [[_shown(hit, scores) for hit in hits] for hits in found]}

    def _read(self, given: Any) -> tuple[list[str], int, bool]:
        if not isinstance(given, dict):
            raise HttpError(422, 'a request is an object: {"queries": [text], "topk": number, "return_scores": bool}.')
        queries, topk, scores = given.get("queries"), given.get("topk"), given.get("return_scores", False)
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise HttpError(422, "queries: a list of texts is needed.")
        if len(queries) > self._max_queries:
            raise HttpError(422, f"queries: {len(queries)} in one request; at most {self._max_queries} are answered.")
        if topk is None:
            topk = self._retriever.topk
        if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MAX_TOPK:
            raise HttpError(422, f"topk: {topk!r}. Give a number from 1 to {MAX_TOPK}, or null for the server's own.")
        if not isinstance(scores, bool):
            raise HttpError(422, f"return_scores: {scores!r}. Give true or false.")
        return queries, topk, scores

    async def _look_up(self, queries: list[str], topk: int) -> list[list[Hit]]:
        answer: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((queries, topk, answer))
        if self._looking is None:
            self._looking = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Look up what waits, as many queries of one `topk` at a time as fit, until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._next_batch()
            queries = [query for asked, _, _ in batch for query in asked]
            try:
                found = iter(await loop.run_in_executor(self._thread, self._retriever.retrieve, queries, batch[0][1]))
            except Exception as error:  # noqa: BLE001 - everybody who asked is told
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for asked, _, future in batch:
                answer = [next(found) for _ in asked]
                if not future.done():  # else its client has left
                    future.set_result(answer)
        self._looking = None

    def _next_batch(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        size = len(batch[0][0])
        while self._waiting and self._waiting[0][1] == batch[0][1] and size < _BATCH:
            batch.append(self._waiting.popleft())
            size += len(batch[-1][0])
        return batch


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; 2 is the exit code of what cannot be started as asked."""
    options = _parser().parse_args(arguments)
    setup_logging()
    try:
        _serve(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _serve(options: argparse.Namespace) -> None:
    with bound(options.host, options.port) as address:
        warn_if_open(address, "Leave out --host to serve this machine only.")
        retriever = open_retriever(
            options.corpus_path,
            options.retriever_name,
            options.topk,
            index_path=options.index_path,
            model=options.retriever_model,
            faiss_gpu=options.faiss_gpu,
        )
        app = SearchApp(retriever, options.retriever_name, options.max_body_mb * 2**20)
        what = f"{len(retriever.corpus)} documents ({options.retriever_name})"
        asyncio.run(asgi_server(app, what, Limits(), "/retrieve").serve([address]))


def _shown(hit: Hit, scores: bool) -> dict[str, Any]:
    document = hit.document._asdict()
    return {"document": document, "score": hit.score} if scores else document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verl.search.server", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--corpus_path", required=True, help='JSON lines of {"id", "contents"}')
    add("--retriever_name", default="bm25", choices=RETRIEVERS, help="(default: %(default)s)")
    add("--index_path", help="folder to keep the index in (default: the cache), or a faiss file made elsewhere")
    add("--topk", type=_count, default=DEFAULT_TOPK, help="documents where a request names no number (default: 3)")
    add("--retriever_model", help="dense: a sentence-transformers folder or hub name")
    add("--faiss_gpu", action="store_true", help="dense: search on the GPUs, where faiss has them")
    add("--host", default="127.0.0.1", help="address to serve on (default: %(default)s, this machine only)")
    add("--port", type=int, default=DEFAULT_PORT, help="port (default: %(default)s; 0: any that is free)")
    add("--max_body_mb", type=_count, default=8, help="size of one request (default: %(default)s)")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
