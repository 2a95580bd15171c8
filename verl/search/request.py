"""The request of the search API.

Not in server.py: that module runs as `__main__`, and requests are unpickled from parser processes by module name.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from verl.search.retriever import MAX_QUERIES, MAX_TOPK, check_queries
from verl.utils.http_server.json_body import RequestModel

__all__ = ["MAX_HITS", "RetrieveRequest"]

MAX_HITS = 65536
"""Documents of one response."""


class RetrieveRequest(RequestModel):
    """`POST /retrieve`. Fields of other versions of the API are ignored."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    """None: the server's default."""
    return_scores: bool = False

    @model_validator(mode="after")
    def _check_work(self) -> RetrieveRequest:
        check_queries(self.queries, self.topk)
        if len(self.queries) * (self.topk or 1) > MAX_HITS:
            raise ValueError(f"queries: {len(self.queries)} with topk {self.topk} exceed {MAX_HITS} documents")
        return self
