"""The request of the search API.

The request is not defined in server.py, because that module runs as `__main__`, and parser processes pickle requests by
the name of their module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from verl.search.retriever import MAX_QUERIES, MAX_TOPK, QueryLimit, check_queries
from verl.utils.http_server.json_body import RequestModel

__all__ = ["MAX_HITS", "RetrieveRequest", "check_response_size"]

MAX_HITS = 65536
"""Maximum number of documents in one response."""


class RetrieveRequest(RequestModel):
    """The body of `POST /retrieve`. Unknown fields, of other versions of the API, are ignored."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    """Documents per query; None: the server's default."""
    return_scores: bool = False

    @model_validator(mode="after")
    def _check_limits(self) -> RetrieveRequest:
        check_queries(self.queries, self.topk)
        if self.topk is not None:  # otherwise checked with the server's default, which is not known here
            check_response_size(self.queries, self.topk)
        return self


def check_response_size(queries: Sequence[str], topk: int) -> None:
    """Raise QueryLimit if a response with `topk` documents per query may have more than MAX_HITS."""
    if len(queries) * topk > MAX_HITS:
        raise QueryLimit(f"queries: {len(queries)} with topk {topk} exceed {MAX_HITS} documents")
