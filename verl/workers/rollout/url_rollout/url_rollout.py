"""URLRollout: a replica that runs already, joined by URL. Our thread answers requests, its server samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from verl.config import ModelConfig, RolloutConfig
from verl.inference.async_engine import AsyncEngine
from verl.inference.models.loading import end_tokens, read_model_config
from verl.models.loading import empty_model
from verl.types.request import Output, Request
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.embedded_rollout import EmbeddedRollout
from verl.workers.rollout.log_prob_probe import require_log_probs_as_drawn
from verl.workers.rollout.streamed_server import RestartingSteps, StreamedServer
from verl.workers.rollout.url_rollout.http_source import HTTPSource
from verl.workers.rollout.url_rollout.join import join
from verl.workers.rollout.url_rollout.weights import ServerWeights

__all__ = ["URLRollout"]

logger = logging.getLogger(__name__)


class URLRollout(EmbeddedRollout):
    """One server is one replica, whatever it runs on; whose tokens it samples is this process's affair alone."""

    def __init__(
        self,
        model_path: str,
        model_config: ModelConfig,
        config: RolloutConfig,
        device: torch.device | str,
        url: str,
    ) -> None:
        """`device` is the trainer's: where the weights come from."""
        hf_config = read_model_config(model_path, model_config)
        ends = end_tokens(model_path, hf_config, model_config).ids
        joined = join(url, model_path, config, hf_config, ends, torch.empty(0, device=device).device)
        server = self._server = joined.dialect
        self._line = joined.line
        logger.info("rollout: joined %s at %s, %s", server.engine, url, server.dtype)
        self._steps = RestartingSteps(
            partial(StreamedServer, HTTPSource(server)), config.max_model_len, server.after_truncation
        )
        skeleton = empty_model(hf_config, "causal_lm", server.dtype, model_config.trust_remote_code)
        text = hf_config.get_text_config(decoder=True)
        self._vocab, self._proven = int(text.vocab_size), False
        super().__init__(
            config,
            torch.device("cpu"),  # nothing of it is on a device here
            server.dtype,
            loop=AsyncEngine(
                self._steps, partial(hf_tokenizer, model_path, trust_remote_code=model_config.trust_remote_code)
            ),
            weights=ServerWeights(joined.line, skeleton, server.dtype),
            kv=None,
            eos_token_ids=ends,
            pad_token_id=text.pad_token_id,
        )

    def submit(self, requests: Sequence[Request]) -> list[Future[Output]]:
        self._require_ready()
        if not self._proven:
            self._proven = require_log_probs_as_drawn(
                f"{self._server.engine} at {self._server.server.url}",
                self._server.top,
                self._vocab,
                self._server.after_truncation,
                self._server.dtype,
            )
        return super().submit(requests)

    def restart_if_dead(self) -> bool:
        """Join a server again that was started anew."""
        self._server.server.wait_until_back()
        self._line.leave()
        if self._server.weights_name() == self._server.known_weights:
            self._server.resume()  # it may have been paused when it was lost
            return False
        self._server.join()
        self._unfit = "Its server was started anew: the trainer's weights come by an update."
        self._proven = False
        return True

    def close(self) -> None:
        super().close()
        self._steps.close()
