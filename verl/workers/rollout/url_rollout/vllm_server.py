"""`vllm serve`: its HTTP API and required options, and the weight transfer to our extension of its workers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import SplitResult

import torch

from verl.inference.sequence import Sequence as TokenSequence
from verl.types.weights import Bucket, WeightMismatchError
from verl.utils.device import resolve_dtype
from verl.utils.transfer_group import TransferGroup, TransferHost
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.streaming_server import StreamEvent, params_after
from verl.workers.rollout.third_party import PROBE_PROMPT, PROBE_TOP_TOKENS
from verl.workers.rollout.url_rollout.server import ServerAPI, ServerError, WeightTransport, run_both_sides
from verl.workers.rollout.url_rollout.vllm_worker import SERVER_EXTENSION, device_name
from verl.workers.rollout.vllm_rollout.step_engine import sampling_arguments
from verl.workers.rollout.weights import bucket_layout, layout_bytes

_RPC_TIMEOUT_S = 600.0
_LOG_PROBS_MODE = "processed_logprobs"
# Fields of the model configuration that must be equal in trainer and server.
_MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


class VllmServerAPI(ServerAPI):
    """Token ids are sent and received by the completions API; control calls use development endpoints."""

    path = "/v1/completions"
    log_probs_after_filtering = True

    def connect(self) -> None:
        config = self._config
        self.engine = f"vLLM {self.client.get('/version')['version']}"
        model = self.client.get("/v1/models")["data"][0]
        self._model_name, length = model["id"], model["max_model_len"]
        self._require(
            self.client.has_endpoint("/server_info"), "it has no development endpoints (VLLM_SERVER_DEV_MODE=1)"
        )
        server_config = self.client.get("/server_info", config_format="json")["vllm_config"]
        self.model = server_config["model_config"]
        self.dtype = getattr(torch, self.model["dtype"].removeprefix("torch."))
        self.device = torch.device(server_config["device_config"]["device"])
        self.max_streams = 2 * int(server_config["scheduler_config"]["max_num_seqs"])
        self._require(
            self.model["logprobs_mode"] == _LOG_PROBS_MODE,
            f"its logprobs_mode is {self.model['logprobs_mode']}; training needs {_LOG_PROBS_MODE}",
        )
        self._require(
            length >= config.max_model_len, f"its max_model_len is {length}; {config.max_model_len} are needed"
        )
        if config.dtype != "auto":
            self._require(
                self.dtype == resolve_dtype(config.dtype, self.device), f"its dtype is {self.dtype}, not {config.dtype}"
            )
        extension = server_config["parallel_config"]["worker_extension_cls"]
        self._require(
            extension == SERVER_EXTENSION,
            f"its worker_extension_cls is {extension!r}; weights are loaded by {SERVER_EXTENSION}",
        )
        self.workers = self.rpc("verl_describe")
        self._require_same_model(self._hf_config)
        self.expected_label = self.weight_label()
        self.resume()  # an interrupted run may have left it paused

    # ---------------------------------------------------------------- requests

    def build_request(self, sequence: TokenSequence) -> dict[str, Any]:
        arguments = sampling_arguments(sequence)
        return {
            "model": self._model_name,
            "prompt": list(sequence.token_ids),
            "stream": True,
            "return_token_ids": True,
            **{name: value for name, value in arguments.items() if value is not None},
        }

    def continue_request(self, request: dict[str, Any], generated: list[int]) -> dict[str, Any]:
        return params_after(request, len(generated)) | {"prompt": request["prompt"] + generated}

    def _parse_tokens(self, data: dict[str, Any], received: int) -> StreamEvent:
        choice = data["choices"][0]
        tokens = choice["token_ids"] or []
        return tokens, choice["logprobs"]["token_logprobs"] if tokens else [], choice["finish_reason"]

    def pause(self) -> None:
        self.client.post("/pause", mode="abort", clear_cache=False)

    def resume(self) -> None:
        self.client.post("/resume")

    def reset_prefix_cache(self) -> None:
        if not self.client.post("/reset_prefix_cache")["success"]:
            raise ServerError(
                f"{self.client.url} does not reset its prefix cache, because requests of another client run there."
            )

    def top_log_probs(self, temperature: float, top_k: int) -> Mapping[int, float]:
        body = {
            "model": self._model_name,
            "prompt": list(PROBE_PROMPT),
            "max_tokens": 1,
            "temperature": temperature,
            "top_k": max(0, top_k),
            "logprobs": PROBE_TOP_TOKENS,
            "return_tokens_as_token_ids": True,
        }
        (top,) = self.client.post(self.path, body)["choices"][0]["logprobs"]["top_logprobs"]
        return {int(token.removeprefix("token_id:")): log_prob for token, log_prob in top.items()}

    # ---------------------------------------------------------------- weights

    def weight_label(self) -> str | None:
        return str(self.client.get("/weight_info")["weight_version"])

    def _post_label(self, label: str) -> None:
        self.client.post("/update_weight_version", {"new_version": label})

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the server's workers; return one result per worker."""
        body = {"method": method, "args": list(args), "timeout": _RPC_TIMEOUT_S}
        return self.client.post("/collective_rpc", body, timeout_s=_RPC_TIMEOUT_S)["results"]

    # ---------------------------------------------------------------- requirements

    def _require_same_model(self, hf_config: Any) -> None:
        ours = hf_config.get_text_config(decoder=True).to_dict()
        theirs = self.workers[0]["model"]
        for name in _MODEL_FIELDS:
            if name in theirs and name in ours:
                self._require(
                    theirs[name] == ours[name], f"its model has {name} {theirs[name]}, the trainer's has {ours[name]}"
                )

    def _server_command(self, url: SplitResult, model_path: str) -> str:
        config = self._config
        words = ["vllm", "serve", model_path, "--host", url.hostname or "", "--port", str(url.port or 80)]
        words += ["--dtype", config.dtype, "--max-model-len", str(config.max_model_len)]
        words += ["--max-num-seqs", str(config.max_num_seqs), "--logprobs-mode", _LOG_PROBS_MODE]
        words += ["--worker-extension-cls", SERVER_EXTENSION]
        return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"


class VllmTransport(WeightTransport):
    """A transport by gloo or NCCL; the server's workers return fingerprints of the received tensors."""

    _api: VllmServerAPI

    def _begin_update(self) -> None:
        self._api.rpc("verl_begin_update")

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert self._group is not None
        bucket: Bucket = dict(tensors)
        layout = bucket_layout(bucket)
        flat = torch.zeros(layout_bytes(layout), dtype=torch.uint8, device=self._group.device)
        for piece in layout:
            piece.view(flat).copy_(bucket[piece.name])
        sent = fingerprints({piece.name: piece.view(flat) for piece in layout})
        pieces = [asdict(piece) for piece in layout]
        group = self._group
        received_by_worker = run_both_sides(
            self._api.client, lambda: group.broadcast(flat), self._api.rpc, "verl_receive", pieces
        )
        for rank, received in enumerate(received_by_worker):
            for name, total in sent.items():
                if received.get(name) != total:
                    raise WeightMismatchError(
                        f"weights: {name!r} differs at worker {rank} of {self._api.client.url} (fingerprint"
                        f" {received.get(name)} there, {total} here). The weight sync lost or changed data."
                    )

    def _finish_update(self) -> None:
        missing = sorted({name for names in self._api.rpc("verl_finish_update") for name in names})
        if missing and self._api.model["quantization"] is None:  # scales are computed, not sent
            raise WeightMismatchError(
                f"weights: {len(missing)} weights of {self._api.client.url} received no value, e.g. {missing[0]!r}."
                " vLLM uses other names for this model than transformers."
            )

    def _create_group(self, host: TransferHost) -> None:
        size = 1 + len(self._api.workers)
        our_device = device_name(self._device)
        worker_devices = {worker["device"] for worker in self._api.workers}
        # NCCL needs a GPU per member, and no two members may share one.
        backend = "gloo" if "cpu" in worker_devices | {our_device} or our_device in worker_devices else "nccl"

        def join() -> None:
            self._group = TransferGroup(host, 0, size, backend, self._device)

        address = host.address
        run_both_sides(self._api.client, join, self._api.rpc, "verl_join", address.host, address.port, size, backend)
