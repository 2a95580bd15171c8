"""A server with the endpoints of `vllm serve` that a rollout uses, over real HTTP; it can disconnect, hang and restart.

The next token depends on all previous ones, so lost or duplicated tokens show in the output. Weights are received by
the code that runs in vLLM's workers.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from urllib.parse import parse_qs

import torch
import uvicorn

from verl.workers.rollout.url_rollout.vllm_worker import SERVER_EXTENSION, WeightMember


def next_token(tokens: list[int]) -> int:
    """The token after these; never an end token."""
    return 5 + (7 * tokens[-1] + 3 * len(tokens) + sum(tokens)) % 250


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Member(WeightMember):
    """A worker without a model that stores the received weights."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.loaded = config, {}

    def verl_describe(self) -> dict[str, Any]:
        return {"model": self.config, "device": "cpu"}

    def verl_begin_update(self) -> None:
        self.loaded = {}

    def verl_load_weights(self, tensors: Any) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}

    def verl_finish_update(self) -> list[str]:
        return []


class URLServer:
    """`disconnect_at`: index of the token after which the connection of a response breaks, once."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.info = {
            "model_config": {
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
                "enable_sleep_mode": False,
                "quantization": None,
            },
            "device_config": {"device": "cpu"},
            "scheduler_config": {"max_num_seqs": 4},
            "parallel_config": {"worker_extension_cls": SERVER_EXTENSION},
        }
        self.length = 128
        self.development = True
        self.member = Member(config)
        self.weights = "default"
        self.paused = False
        self.disconnect_at: int | None = None
        self.prompts: list[list[int]] = []
        self.running = 0
        self.max_running = 0
        self.prefix_resets = 0
        self.ignores_temperature = False
        self.port = 0

    def start(self) -> URLServer:
        self._uvicorn = uvicorn.Server(uvicorn.Config(self, "127.0.0.1", self.port, log_level="error"))
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            self._thread.join(0.01)
            if not self._thread.is_alive():
                raise RuntimeError(f"the server of the test ended during its start on port {self.port}")
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive()).get("more_body", False):
            body += message["body"]
        body += message.get("body", b"")
        path, query = scope["path"], parse_qs(scope["query_string"].decode())
        if path == "/v1/completions" and json.loads(body).get("stream"):
            await self._stream(json.loads(body), receive, send)
            return
        reply = await asyncio.to_thread(self._reply, path, query, json.loads(body) if body else None)
        await _send_status(send, 404 if reply is None else 200)
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    def _reply(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        replies = {
            "/version": {"version": "0.0"},
            "/health": {},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": self.length}]},
            "/weight_info": {"weight_version": self.weights},
            "/server_info": {"vllm_config": self.info} if self.development else None,
        }
        if path in replies:
            return replies[path]
        if path == "/pause":
            assert query["mode"] == ["abort"]
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/reset_prefix_cache":
            self.prefix_resets += 1
            return {"success": True}
        elif path == "/update_weight_version":
            self.weights = body["new_version"]
        elif path == "/v1/completions":
            temperature = 1.0 if self.ignores_temperature else body["temperature"]
            return {"choices": [{"logprobs": {"top_logprobs": [_top_log_probs(temperature, body["top_k"])]}}]}
        elif path == "/collective_rpc":
            return {"results": [getattr(self.member, body["method"])(*body["args"])]}
        else:
            return None
        return {}

    async def _stream(self, request: dict[str, Any], receive: Any, send: Any) -> None:
        self.prompts.append(request["prompt"])
        tokens = list(request["prompt"])
        disconnected = asyncio.create_task(receive())
        await _send_status(send, 200)
        while self.paused and not disconnected.done():
            await asyncio.sleep(0.005)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            for number in range(request["max_tokens"]):
                if disconnected.done():
                    return
                tokens.append(next_token(tokens))
                last = number + 1 == request["max_tokens"]
                reason = "abort" if self.paused else "length" if last else None
                await _send_token(send, tokens[-1], reason)
                if reason:
                    break
                if self.disconnect_at == number:
                    self.disconnect_at = None
                    raise ConnectionError  # the body is incomplete: the client sees a broken connection
                await asyncio.sleep(0.003)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        finally:
            self.running -= 1
            disconnected.cancel()


def _top_log_probs(temperature: float, top_k: int) -> dict[str, float]:
    """Log-probs after temperature and top-k; the vocabulary has 264 tokens with descending logits."""
    logits = -0.1 * torch.arange(top_k or 264, dtype=torch.float64) / temperature
    return {f"token_id:{token}": value for token, value in enumerate(logits.log_softmax(0)[:20].tolist())}


async def _send_status(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})


async def _send_token(send: Any, token: int, reason: str | None) -> None:
    choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-token / 100]}, "finish_reason": reason}
    event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": True})
