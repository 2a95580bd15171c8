"""The request of the search API."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from verl.utils.http_server.json_body import RequestModel

__all__ = ["MAX_QUERIES", "MAX_TOPK", "RetrieveRequest"]

MAX_TOPK = 1000
MAX_QUERIES = 1024


class RetrieveRequest(RequestModel):
    """`POST /retrieve`. Fields of other versions of the API are ignored."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], Field(max_length=MAX_QUERIES)]
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)] | None = None
    """None: the server's default."""
    return_scores: bool = False
