"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verl.inference.lora import LoraError, LoraRegistry, UnknownAdapterError
from verl.inference.serving.api_errors import ApiError
from verl.utils.http_server.app import request_body
from verl.utils.http_server.json_body import parse_json

__all__ = ["lora_routes"]

_MAX_NAME = 200

logger = logging.getLogger(__name__)


def lora_routes(loras: LoraRegistry, root: Path | None) -> list[Route]:
    """Routes that load adapters from folders below `root` (None: any folder) and unload them."""
    # One adapter at a time: requests that wait must not occupy the threads of other requests.
    loading = asyncio.Lock()

    async def load(request: Request) -> Response:
        name, path = _read_fields(request, ("lora_name", "lora_path"))
        try:
            async with loading:
                await asyncio.to_thread(loras.load, name, path, root)
        except LoraError as error:
            raise ApiError(str(error), error.field) from error
        logger.info("loaded the LoRA adapter %r from %r", name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        (name,) = _read_fields(request, ("lora_name",))
        try:
            async with loading:
                await asyncio.to_thread(loras.unload, name)
        except UnknownAdapterError as error:
            raise ApiError(str(error), error.field, 404, "model_not_found") from error
        logger.info("unloaded the LoRA adapter %r", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _read_fields(request: Request, names: Sequence[str]) -> list[str]:
    """The values of these fields of a JSON body, which may also have vLLM's `lora_int_id`."""
    fields: Any = parse_json(bytes(request_body(request)))
    if not isinstance(fields, dict):
        raise ApiError("The body must be a JSON object.")
    unknown = sorted(fields.keys() - {*names, "lora_int_id"})
    if unknown:
        raise ApiError(f"{unknown[0][:_MAX_NAME]}: unknown field. Use {', '.join(names)}.", unknown[0][:_MAX_NAME])
    for name in names:
        value = fields.get(name)
        if not isinstance(value, str) or not value:
            raise ApiError(f"{name}: should be a non-empty string.", name)
        if name == "lora_name" and len(value) > _MAX_NAME:
            raise ApiError(f"{name}: has {len(value)} characters; at most {_MAX_NAME} are allowed.", name)
    return [fields[name] for name in names]
