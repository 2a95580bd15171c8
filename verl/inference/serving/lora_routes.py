"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verl.inference.lora_registry import LoraRegistry
from verl.inference.serving.api_errors import ApiError
from verl.utils.http_server.app import request_body
from verl.utils.http_server.json_body import parse_json

__all__ = ["lora_routes"]

_MAX_NAME = 200

logger = logging.getLogger(__name__)


def lora_routes(loras: LoraRegistry, model_names: Sequence[str]) -> list[Route]:
    """Routes that load and unload adapters. `model_names`: names that adapters cannot have."""

    async def load(request: Request) -> Response:
        name, path = _read_fields(request, ("lora_name", "lora_path"))
        if name in model_names:
            raise ApiError(f"lora_name: {name!r} is the name of the model.", "lora_name")
        if name in loras.names():
            raise ApiError(f"lora_name: {name!r} is already loaded. Unload it first.", "lora_name")
        try:
            await asyncio.to_thread(loras.load, name, path)
        except ValueError as error:
            raise ApiError(str(error), str(error).partition(":")[0]) from error
        logger.info("loaded the LoRA adapter %r from %s", name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        (name,) = _read_fields(request, ("lora_name",))
        if name not in loras.names():
            raise ApiError(f"lora_name: {name!r} is not loaded.", "lora_name", 404, "model_not_found")
        await asyncio.to_thread(loras.unload, name)
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
        if not isinstance(value, str) or not value or (name == "lora_name" and len(value) > _MAX_NAME):
            raise ApiError(f"{name}: should be a non-empty string.", name)
    return [fields[name] for name in names]
