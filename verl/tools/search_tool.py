"""SearchTool: a retriever service as a tool that takes several queries per call."""

from __future__ import annotations

from typing import Any

from verl.search.client import NO_RESULTS, RetrieverClient, RetrieverError, format_documents
from verl.tools.base_tool import BaseTool, ToolError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_DEFAULTS = {"retrieval_service_url": None, "topk": 3, "timeout": 30, "num_workers": 120, "rate_limit": 120}


class SearchTool(BaseTool):
    """Requests `topk` documents per query from `retrieval_service_url`, with a `timeout` in seconds.

    Per loop worker, at most `num_workers` calls run at a time and `rate_limit` start per second (enforced by
    `ToolSession`).
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__({**_DEFAULTS, **config}, tool_schema)
        if not self.config["retrieval_service_url"]:
            raise ValueError(
                f"{self.name}: config.retrieval_service_url is not set. Start a service (python -m verl.search.server "
                "--corpus_path FILE) and set its address: http://127.0.0.1:8000/retrieve."
            )
        self.retrieval_service_url = str(self.config["retrieval_service_url"])
        self.topk = int(self.config["topk"])
        self._timeout = float(self.config["timeout"])
        self._client: RetrieverClient | None = None

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        queries = {"type": "array", "items": {"type": "string"}, "description": "Search queries, one string each."}
        function = {
            "name": "search",
            "description": "Searches for documents that match one or more queries.",
            "parameters": {"type": "object", "properties": {"query_list": queries}, "required": ["query_list"]},
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def check(self) -> str | None:
        # A separate client: this may run in another event loop than the trajectories.
        client = self._new_client()
        try:
            await client.check()
        except RetrieverError as error:
            start = "Start it: python -m verl.search.server --corpus_path FILE --port 8000"
            return f"no search service responds at {self.retrieval_service_url} ({error}). {start}"
        finally:
            await client.close()
        return None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        queries = [str(query) for query in parameters["query_list"]]
        if not queries:
            raise ToolError("query_list is empty. Pass at least one query.")
        if self._client is None:
            self._client = self._new_client()
        try:
            results = await self._client.retrieve(queries, self.topk)
        except RetrieverError as error:
            raise ToolError("The search failed. Answer without it, or try again.") from error
        texts = [format_documents(hits).rstrip() or NO_RESULTS for hits in results]
        if len(queries) > 1:
            texts = [f"Query: {query}\n{text}" for query, text in zip(queries, texts, strict=True)]
        total = sum(len(hits) for hits in results)
        return ToolResponse(text="\n---\n".join(texts)), None, {"query_count": len(queries), "total_results": total}

    def _new_client(self) -> RetrieverClient:
        return RetrieverClient(self.retrieval_service_url, timeout_s=self._timeout)
