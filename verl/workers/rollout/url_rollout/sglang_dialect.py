"""How SGLang's server is spoken to, and what it must have been started with."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch

from verl.config import RolloutConfig
from verl.inference.sequence import Sequence
from verl.utils.device import resolve_dtype
from verl.workers.rollout.log_prob_probe import PROBE_PROMPT, PROBED_TOKENS
from verl.workers.rollout.sglang_rollout.sampling import sampling_arguments
from verl.workers.rollout.streamed_server import Event
from verl.workers.rollout.url_rollout.server import Server, ServerError

__all__ = ["SGLangDialect"]


class SGLangDialect:
    """Token ids in and out by its own `/generate`."""

    path = "/generate"
    after_truncation = False

    def __init__(
        self, server: Server, model_path: str, config: RolloutConfig, hf_config: Any, ends: frozenset[int]
    ) -> None:
        """Raises ServerError, with the command line that starts it right, where it cannot serve a training.

        `ends`: tokens at which it ends every answer of this model by itself.
        """
        self.server = server
        self._ends = ends
        self._command = _command(server, model_path, config)
        self._config, self._hf_config = config, hf_config
        # Of the KV that requests may share: another one when weights change, and none that a run before had.
        self._epoch = uuid.uuid4().hex
        self.join()

    def join(self) -> None:
        config, hf_config = self._config, self._hf_config
        found = self.server.get("/server_info")
        self.engine = f"SGLang {found['version']}"
        self.device = torch.device(found["device"])
        self.ranks = int(found["tp_size"])
        self.open_at_once = 2 * int(found["max_running_requests"] or config.max_num_seqs)
        dtype = str(found["dtype"]).removeprefix("torch.")
        self.dtype = resolve_dtype(config.dtype if dtype == "auto" else dtype, self.device)
        self._require(
            config.dtype == "auto" or self.dtype == resolve_dtype(config.dtype, self.device),
            f"its dtype is {dtype}, not {config.dtype}",
        )
        length = found["context_length"] or hf_config.get_text_config(decoder=True).max_position_embeddings
        self._require(
            length >= config.max_model_len, f"its context_length is {length}; {config.max_model_len} are needed"
        )
        theirs, ours = self.server.get("/model_info")["architectures"], list(hf_config.architectures or ())
        self._require(not theirs or not ours or theirs == ours, f"its model is a {theirs}, the trainer's a {ours}")
        self.known_weights = self.weights_name()
        self.resume()  # a run that ended in the middle may have left it paused

    # ---------------------------------------------------------------- requests

    def question(self, sequence: Sequence) -> dict[str, Any]:
        asked = sampling_arguments(sequence, self._ends)
        return {
            "input_ids": list(sequence.token_ids),
            "sampling_params": {name: value for name, value in asked.items() if value is not None},
            "extra_key": self._epoch,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }

    def continued(self, question: dict[str, Any], told: list[int]) -> dict[str, Any]:
        params = question["sampling_params"]
        lengths = [name for name in ("max_new_tokens", "min_new_tokens") if name in params]
        params = params | {name: max(0, params[name] - len(told)) for name in lengths}
        now = {"input_ids": question["input_ids"] + told, "sampling_params": params, "extra_key": self._epoch}
        return question | now

    def event(self, data: dict[str, Any], seen: int) -> Event:
        if "error" in data:
            raise ServerError(f"{self.server.url}: {data['error']}")
        said = data["meta_info"]
        # Whether it tells all so far or what is new, the new ones are the last.
        new = said["completion_tokens"] - seen
        tokens = data["output_ids"][-new:] if new else []
        log_probs = [entry[0] for entry in said["output_token_logprobs"][-new:]] if new else []
        ended = said["finish_reason"]
        return tokens, log_probs, ended["type"] if ended else None

    def pause(self) -> None:
        self.server.post("/pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        self.server.post("/continue_generation", {})

    def forget_prefixes(self) -> None:
        """It drops no KV while somebody runs: newcomers look for theirs under another name."""
        self._epoch = uuid.uuid4().hex

    def top(self, temperature: float, top_k: int) -> Mapping[int, float]:
        """Log-probs of the likeliest tokens after `PROBE_PROMPT`."""
        body = {
            "input_ids": list(PROBE_PROMPT),
            "sampling_params": {"temperature": temperature, "top_k": top_k, "max_new_tokens": 1, "ignore_eos": True},
            "extra_key": uuid.uuid4().hex,  # of nobody's KV: it would round otherwise
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": PROBED_TOKENS,
        }
        (found,) = self.server.post("/generate", body)["meta_info"]["output_top_logprobs"]
        return {token: log_prob for log_prob, token, *_ in found}

    # ---------------------------------------------------------------- weights

    def weights_name(self) -> str | None:
        return str(self.server.get("/model_info")["weight_version"])

    def name_weights(self, name: str) -> None:
        self.command("/update_weight_version", new_version=name, abort_all_requests=False)
        self.known_weights = name

    def command(self, path: str, **body: Any) -> Any:
        """Post, and raise unless it says that it was done."""
        said = self.server.post(path, body, timeout_s=600.0)
        if said and not said.get("success", True):
            raise ServerError(f"rollout.server_urls: {self.server.url}{path} failed: {said['message']}")
        return said

    def _require(self, holds: bool, trouble: str) -> None:
        if not holds:
            raise ServerError(
                f"rollout.server_urls: {self.server.url} cannot serve this run: {trouble}. Start it by\n{self._command}"
            )


def _command(server: Server, model_path: str, config: RolloutConfig) -> str:
    where = urlsplit(server.url)
    words = ["python", "-m", "sglang.launch_server", "--model-path", model_path, "--host", where.hostname or ""]
    words += ["--port", str(where.port or 80), "--dtype", config.dtype, "--context-length", str(config.max_model_len)]
    words += ["--max-running-requests", str(config.max_num_seqs), "--stream-interval", "1"]
    return f"SGLANG_RETURN_ORIGINAL_LOGPROB=0 {shlex.join(words)}"
