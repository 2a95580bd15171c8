"""SGLangSteps: the steps of SGLang, and what it is not asked."""

from __future__ import annotations

from functools import partial

import torch

from verl.inference.sequence import Sequence
from verl.types.request import Request
from verl.workers.rollout.log_prob_probe import PROBE_PROMPT, PROBED_TOKENS, require_log_probs_as_drawn
from verl.workers.rollout.served import ServedStepEngine, Tell
from verl.workers.rollout.sglang_rollout.engine_thread import EngineThread
from verl.workers.rollout.sglang_rollout.server import SGLangServer

__all__ = ["SGLangSteps"]


class SGLangSteps(ServedStepEngine):
    """Its log-probs are at the temperature, before top-k, top-p and min-p: which is made sure of before the first."""

    server: SGLangServer

    def __init__(
        self, thread: EngineThread, own_ends: frozenset[int], max_length: int, vocab: int, dtype: torch.dtype
    ) -> None:
        """`own_ends` as in `Asked.of`."""

        def connect(tell: Tell) -> SGLangServer:
            self.server = SGLangServer(thread, own_ends, tell)
            return self.server

        super().__init__(connect, max_length, after_truncation=False, tells_details=True)
        self._probe = partial(
            require_log_probs_as_drawn,
            f"SGLang {thread.version}",
            lambda temperature, top_k: self.server.likeliest(PROBE_PROMPT, temperature, top_k, PROBED_TOKENS),
            vocab,
            after_truncation=False,
            dtype=dtype,
        )
        self._probed = False

    def check(self, request: Request) -> None:
        super().check(request)
        asked, earlier = request.params, request.resume_from
        if earlier and earlier.token_ids and (asked.presence_penalty or asked.frequency_penalty):
            raise ValueError(
                f"request {request.id!r}: SGLang counts what resume_from has generated as prompt, where"
                " presence_penalty and frequency_penalty do not look. Leave them out, or use rollout.name=native."
            )

    def step(self) -> list[Sequence]:
        if not self._probed:
            self.server.resume()
            self._probed = self._probe()
        return super().step()
