"""URLRollout: a replica that already runs as a server, connected by URL. The server samples; this process drives it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.build import default_end_tokens, read_hf_config
from verl.models.loading import empty_model
from verl.types.request import Output, Request
from verl.workers.rollout.embedded_rollout import EmbeddedRollout, request_loop
from verl.workers.rollout.streaming_server import ResendingStepEngine, StreamingServer
from verl.workers.rollout.third_party import check_reported_log_probs
from verl.workers.rollout.url_rollout.server import ControlClient, HTTPTokenSource, ServerError, ServerWeights
from verl.workers.rollout.url_rollout.sglang_server import SGLangServerAPI, SGLangTransport
from verl.workers.rollout.url_rollout.vllm_server import VllmServerAPI, VllmTransport

logger = logging.getLogger(__name__)


class URLRollout(EmbeddedRollout):
    """One server is one replica, independent of its parallelism. Only this process may send requests to it."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str,
        url: str,
    ) -> None:
        """`device`: the trainer's, which the weights are sent from."""
        hf_config = read_hf_config(model_path, model_config)
        eos_token_ids = default_end_tokens(model_path, hf_config, model_config).ids
        trainer_device = torch.empty(0, device=device).device
        self._api, self._transport = connect(url, model_path, config, hf_config, eos_token_ids, trainer_device)
        api = self._api
        logger.info("rollout: connected to %s at %s, %s", api.engine, url, api.dtype)
        self._step_engine = ResendingStepEngine(
            partial(StreamingServer, HTTPTokenSource(api)), config.max_model_len, api.log_probs_after_filtering
        )
        skeleton = empty_model(hf_config, "causal_lm", api.dtype, model_config.trust_remote_code)
        text_config = hf_config.get_text_config(decoder=True)
        self._vocab_size, self._log_probs_checked = int(text_config.vocab_size), False
        super().__init__(
            config,
            torch.device("cpu"),  # the server uses no device of this process
            api.dtype,
            loop=request_loop(self._step_engine, model_path, model_config),
            weights=ServerWeights(self._transport, skeleton, api.dtype),
            kv=None,
            eos_token_ids=eos_token_ids,
            pad_token_id=text_config.pad_token_id,
        )

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        self._require_ready()
        if not self._log_probs_checked:
            self._log_probs_checked = check_reported_log_probs(
                f"{self._api.engine} at {self._api.client.url}",
                self._api.top_log_probs,
                self._vocab_size,
                self._api.log_probs_after_filtering,
                self._api.dtype,
            )
        return super().submit(requests)

    def restart_if_dead(self) -> bool:
        """Wait until the server replies; return whether it was restarted and lost its weights."""
        self._api.client.wait_for_reply()
        self._transport.reset()
        if self._api.weight_label() == self._api.expected_label:
            self._api.resume()  # it may have been paused when the connection was lost
            return False
        self._api.connect()
        self._unusable_reason = "The server was restarted: a weight sync must come first."
        self._log_probs_checked = False
        return True

    def close(self) -> None:
        super().close()
        self._step_engine.close()


def connect(
    url: str,
    model_path: str,
    config: RolloutConfig,
    hf_config: Any,
    eos_token_ids: frozenset[int],
    device: torch.device,
) -> tuple[VllmServerAPI | SGLangServerAPI, VllmTransport | SGLangTransport]:
    """The API of the server at a URL, and the transport of weights from `device`. ServerError, with cause and remedy,
    if the server is not suitable for this run. `eos_token_ids`: the model's end tokens."""
    client = ControlClient(url)
    try:
        return _api_and_transport(client, model_path, config, hf_config, eos_token_ids, device)
    except BaseException:
        client.close()
        raise


def _api_and_transport(
    client: ControlClient,
    model_path: str,
    config: RolloutConfig,
    hf_config: Any,
    eos_token_ids: frozenset[int],
    device: torch.device,
) -> tuple[VllmServerAPI | SGLangServerAPI, VllmTransport | SGLangTransport]:
    kind = "sglang" if client.has_endpoint("/model_info") else "vllm" if client.has_endpoint("/version") else None
    if kind is None:
        raise ServerError(
            f"rollout.server_urls: {client.url} has neither /version, as vLLM has, nor /model_info, as SGLang has. Set"
            " the URL of the server itself, without a path such as /v1."
        )
    if config.name != kind:
        raise ServerError(
            f"rollout.server_urls: {kind} runs at {client.url}, but rollout.name is {config.name}. Set it to {kind}, or"
            " set the URL of another server."
        )
    try:
        if kind == "vllm":
            vllm = VllmServerAPI(client, model_path, config, hf_config)
            return vllm, VllmTransport(vllm, device)
        sglang = SGLangServerAPI(client, model_path, config, hf_config, eos_token_ids)
        return sglang, SGLangTransport(sglang, device)
    except (LookupError, TypeError) as error:
        raise ServerError(
            f"rollout.server_urls: the configuration that {client.url} reports cannot be read"
            f" ({type(error).__name__}: {error}). docs/reference/servers.md lists the tested versions."
        ) from error
