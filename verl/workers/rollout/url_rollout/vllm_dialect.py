"""How a `vllm serve` is spoken to, and what it must have been started with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch

from verl.config import RolloutConfig
from verl.inference.sequence import Sequence
from verl.utils.device import resolve_dtype
from verl.workers.rollout.log_prob_probe import PROBE_PROMPT, PROBED_TOKENS
from verl.workers.rollout.streamed_server import Event, after_tokens
from verl.workers.rollout.url_rollout.server import Server, ServerError
from verl.workers.rollout.url_rollout.vllm_worker import SERVER_EXTENSION
from verl.workers.rollout.vllm_rollout.sampling import sampling_arguments

__all__ = ["VllmDialect"]

_LOG_PROBS = "processed_logprobs"
# Of the shape of a model: what must be the same for one's weights to be the other's.
_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


class VllmDialect:
    """Token ids in and out by the completions API; the rest by the development endpoints."""

    path = "/v1/completions"
    after_truncation = True

    def __init__(self, server: Server, model_path: str, config: RolloutConfig, hf_config: Any) -> None:
        """Raises ServerError, with the command line that starts it right, where it cannot serve a training."""
        self.server = server
        self._command = _command(server, model_path, config)
        self._config, self._hf_config = config, hf_config
        self.join()

    def join(self) -> None:
        config = self._config
        self.engine = f"vLLM {self.server.get('/version')['version']}"
        self._name, length = self._model()
        found = self._configuration()
        self.model = found["model_config"]
        self.dtype: torch.dtype = getattr(torch, self.model["dtype"].removeprefix("torch."))
        self.device = torch.device(found["device_config"]["device"])
        self.open_at_once = 2 * int(found["scheduler_config"]["max_num_seqs"])
        self._require(
            self.model["logprobs_mode"] == _LOG_PROBS,
            f"its logprobs_mode is {self.model['logprobs_mode']}; training needs {_LOG_PROBS}",
        )
        self._require(
            length >= config.max_model_len, f"its max_model_len is {length}; {config.max_model_len} are needed"
        )
        if config.dtype != "auto":
            self._require(
                self.dtype == resolve_dtype(config.dtype, self.device), f"its dtype is {self.dtype}, not {config.dtype}"
            )
        extension = found["parallel_config"]["worker_extension_cls"]
        self._require(
            extension == SERVER_EXTENSION,
            f"its worker_extension_cls is {extension!r}; weights are handed over by {SERVER_EXTENSION}",
        )
        self.workers = self.rpc("verl_describe")
        self._require_same_model(self._hf_config)
        self.known_weights = self.weights_name()
        self.resume()  # a run that ended in the middle may have left it paused

    # ---------------------------------------------------------------- requests

    def question(self, sequence: Sequence) -> dict[str, Any]:
        asked = sampling_arguments(sequence)
        return {
            "model": self._name,
            "prompt": list(sequence.token_ids),
            "stream": True,
            "return_token_ids": True,
            **{name: value for name, value in asked.items() if value is not None},
        }

    def continued(self, question: dict[str, Any], told: list[int]) -> dict[str, Any]:
        return after_tokens(question, len(told)) | {"prompt": question["prompt"] + told}

    def event(self, data: dict[str, Any], seen: int) -> Event:
        if "error" in data:
            raise ServerError(f"{self.server.url}: {data['error']}")
        choice = data["choices"][0]
        tokens = choice["token_ids"] or []
        return tokens, choice["logprobs"]["token_logprobs"] if tokens else [], choice["finish_reason"]

    def pause(self) -> None:
        self.server.post("/pause", mode="abort", clear_cache=False)

    def resume(self) -> None:
        self.server.post("/resume")

    def forget_prefixes(self) -> None:
        if not self.server.post("/reset_prefix_cache")["success"]:
            raise ServerError(f"{self.server.url} does not drop its prefix cache: somebody else's requests run there.")

    def top(self, temperature: float, top_k: int) -> Mapping[int, float]:
        """Log-probs of the likeliest tokens after `PROBE_PROMPT`."""
        body = {
            "model": self._name,
            "prompt": list(PROBE_PROMPT),
            "max_tokens": 1,
            "temperature": temperature,
            "top_k": max(0, top_k),
            "logprobs": PROBED_TOKENS,
            "return_tokens_as_token_ids": True,
        }
        (found,) = self.server.post(self.path, body)["choices"][0]["logprobs"]["top_logprobs"]
        return {int(token.removeprefix("token_id:")): log_prob for token, log_prob in found.items()}

    # ---------------------------------------------------------------- weights

    def weights_name(self) -> str | None:
        return str(self.server.get("/weight_info")["weight_version"])

    def name_weights(self, name: str) -> None:
        self.server.post("/update_weight_version", {"new_version": name})
        self.known_weights = name

    def rpc(self, method: str, *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """What each worker of the server answers."""
        body = {"method": method, "args": list(args), "timeout": timeout_s}
        return self.server.post("/collective_rpc", body, timeout_s=timeout_s)["results"]

    # ---------------------------------------------------------------- what it must be

    def _model(self) -> tuple[str, int]:
        models = self.server.get("/v1/models")["data"]
        return models[0]["id"], models[0]["max_model_len"]

    def _configuration(self) -> dict[str, Any]:
        self._require(self.server.knows("/server_info"), "it has no development endpoints (VLLM_SERVER_DEV_MODE=1)")
        return self.server.get("/server_info", config_format="json")["vllm_config"]

    def _require_same_model(self, hf_config: Any) -> None:
        ours = hf_config.get_text_config(decoder=True).to_dict()
        theirs = self.workers[0]["model"]
        for name in _SIZES:
            if name in theirs and name in ours:
                self._require(
                    theirs[name] == ours[name], f"its model has {name} {theirs[name]}, the trainer's has {ours[name]}"
                )

    def _require(self, holds: bool, trouble: str) -> None:
        if not holds:
            raise ServerError(
                f"rollout.server_urls: {self.server.url} cannot serve this run: {trouble}. Start it by\n{self._command}"
            )


def _command(server: Server, model_path: str, config: RolloutConfig) -> str:
    where = urlsplit(server.url)
    words = ["vllm", "serve", model_path, "--host", where.hostname or "", "--port", str(where.port or 80)]
    words += ["--dtype", config.dtype, "--max-model-len", str(config.max_model_len)]
    words += ["--max-num-seqs", str(config.max_num_seqs), "--logprobs-mode", _LOG_PROBS]
    words += ["--worker-extension-cls", SERVER_EXTENSION]
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"
