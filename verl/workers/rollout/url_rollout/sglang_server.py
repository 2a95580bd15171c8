"""SGLang's server: its HTTP API and required options, and the weight transfer by its own update group, verified by its
checksums (it runs none of our code)."""

from __future__ import annotations

import hashlib
import logging
import shlex
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult

import torch

from verl.config import RolloutConfig
from verl.inference.sequence import Sequence as TokenSequence
from verl.types.weights import WeightMismatchError
from verl.utils.device import resolve_dtype
from verl.utils.transfer_group import TransferGroup, TransferHost
from verl.workers.rollout.sglang_rollout.server import sampling_arguments
from verl.workers.rollout.streaming_server import StreamEvent
from verl.workers.rollout.third_party import PROBE_PROMPT, PROBE_TOP_TOKENS
from verl.workers.rollout.url_rollout.server import (
    ControlClient,
    ServerAPI,
    ServerError,
    WeightTransport,
    run_both_sides,
)
from verl.workers.rollout.weights import dtype_name

logger = logging.getLogger(__name__)

# Tensors with more elements are compared only in the first update of a transfer group, because checksums are computed
# on one core.
_MAX_CHECKED_ELEMENTS = 1 << 20
# SGLang pads vocabularies to a multiple of this, and its checksums include the padding.
_VOCAB_MULTIPLE = 64


class SGLangServerAPI(ServerAPI):
    """Token ids are sent and received by SGLang's own `/generate`."""

    path = "/generate"
    log_probs_after_filtering = False

    def __init__(
        self,
        client: ControlClient,
        model_path: str,
        config: RolloutConfig,
        hf_config: Any,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`eos_token_ids`: tokens at which SGLang ends every response of this model."""
        self._eos_token_ids = eos_token_ids
        # Namespace of the prefix cache: changes with the weights, and is unique to this run.
        self._cache_key = uuid.uuid4().hex
        super().__init__(client, model_path, config, hf_config)

    def connect(self) -> None:
        config, hf_config = self._config, self._hf_config
        info = self.client.get("/server_info")
        self.engine = f"SGLang {info['version']}"
        self.device = torch.device(info["device"])
        self.ranks = int(info["tp_size"])
        self.max_streams = 2 * int(info["max_running_requests"] or config.max_num_seqs)
        dtype = str(info["dtype"]).removeprefix("torch.")
        self.dtype = resolve_dtype(config.dtype if dtype == "auto" else dtype, self.device)
        self._require(
            config.dtype == "auto" or self.dtype == resolve_dtype(config.dtype, self.device),
            f"its dtype is {dtype}, not {config.dtype}",
        )
        length = info["context_length"] or hf_config.get_text_config(decoder=True).max_position_embeddings
        self._require(
            length >= config.max_model_len, f"its context_length is {length}; {config.max_model_len} are needed"
        )
        theirs, ours = self.client.get("/model_info")["architectures"], list(hf_config.architectures or ())
        self._require(not theirs or not ours or theirs == ours, f"its model is {theirs}, the trainer's is {ours}")
        self.expected_label = self.weight_label()
        self.resume()  # an interrupted run may have left it paused

    # ---------------------------------------------------------------- requests

    def build_request(self, sequence: TokenSequence) -> dict[str, Any]:
        arguments = sampling_arguments(sequence, self._eos_token_ids)
        return {
            "input_ids": list(sequence.token_ids),
            "sampling_params": {name: value for name, value in arguments.items() if value is not None},
            "extra_key": self._cache_key,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
        }

    def continue_request(self, request: dict[str, Any], generated: list[int]) -> dict[str, Any]:
        params = request["sampling_params"]
        lengths = [name for name in ("max_new_tokens", "min_new_tokens") if name in params]
        params = params | {name: max(0, params[name] - len(generated)) for name in lengths}
        return request | {
            "input_ids": request["input_ids"] + generated,
            "sampling_params": params,
            "extra_key": self._cache_key,
        }

    def _parse_tokens(self, data: dict[str, Any], received: int) -> StreamEvent:
        meta = data["meta_info"]
        # Depending on its options, SGLang reports all tokens or only new tokens; new tokens are the last.
        new = meta["completion_tokens"] - received
        tokens = data["output_ids"][-new:] if new else []
        log_probs = [entry[0] for entry in meta["output_token_logprobs"][-new:]] if new else []
        finish_reason = meta["finish_reason"]
        return tokens, log_probs, finish_reason["type"] if finish_reason else None

    def pause(self) -> None:
        self.client.post("/pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        self.client.post("/continue_generation", {})

    def reset_prefix_cache(self) -> None:
        """SGLang cannot flush its cache while requests run: later requests use another cache key."""
        self._cache_key = uuid.uuid4().hex

    def top_log_probs(self, temperature: float, top_k: int) -> Mapping[int, float]:
        body = {
            "input_ids": list(PROBE_PROMPT),
            "sampling_params": {"temperature": temperature, "top_k": top_k, "max_new_tokens": 1, "ignore_eos": True},
            "extra_key": uuid.uuid4().hex,  # no cached KV, with which rounding differs
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": PROBE_TOP_TOKENS,
        }
        (top,) = self.client.post("/generate", body)["meta_info"]["output_top_logprobs"]
        return {token: log_prob for log_prob, token, *_ in top}

    # ---------------------------------------------------------------- weights

    def weight_label(self) -> str | None:
        return str(self.client.get("/model_info")["weight_version"])

    def _post_label(self, label: str) -> None:
        self.command("/update_weight_version", new_version=label, abort_all_requests=False)

    def command(self, path: str, **body: Any) -> Any:
        """Post a command; ServerError unless the server reports success."""
        reply = self.client.post(path, body, timeout_s=600.0)
        if reply and not reply.get("success", True):
            raise ServerError(f"rollout.server_urls: {self.client.url}{path} failed: {reply['message']}")
        return reply

    def _server_command(self, url: SplitResult, model_path: str) -> str:
        config = self._config
        words = ["python", "-m", "sglang.launch_server", "--model-path", model_path, "--host", url.hostname or ""]
        words += ["--port", str(url.port or 80), "--dtype", config.dtype, "--context-length", str(config.max_model_len)]
        words += ["--max-running-requests", str(config.max_num_seqs), "--stream-interval", "1"]
        return f"SGLANG_RETURN_ORIGINAL_LOGPROB=0 {shlex.join(words)}"


class SGLangTransport(WeightTransport):
    """A transport by SGLang's weight update group, which this process joins."""

    _api: SGLangServerAPI

    def __init__(self, api: SGLangServerAPI, device: torch.device) -> None:
        super().__init__(api, device)
        self._checksums: dict[str, str] = {}
        """SHA-256 of sent tensors, by name."""
        self._large_names: set[str] = set()
        """Names of tensors with checksums and more than `_MAX_CHECKED_ELEMENTS` elements."""
        self._comparable = True
        """Whether SGLang's checksums are SHA-256 of sent tensors; set to False if none matches at the first update."""

    def _begin_update(self) -> None:
        self._checksums = {}
        self._api.command("/begin_weight_update")

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        group = self._group
        assert group is not None

        def broadcast() -> None:
            for name, tensor in tensors:
                sent = group.broadcast(tensor.detach().to(group.device).contiguous())
                if self._updates == 0 or name not in self._large_names:
                    self._add_checksum(name, sent)

        run_both_sides(
            self._api.client,
            broadcast,
            self._api.command,
            "/update_weights_from_distributed",
            names=[name for name, _ in tensors],
            dtypes=[dtype_name(tensor.dtype) for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            group_name=self._group_name,
            flush_cache=False,
        )

    def _finish_update(self) -> None:
        self._api.command("/end_weight_update")
        if self._comparable and self._api.ranks == 1:
            self._compare_checksums()

    def _create_group(self, host: TransferHost) -> None:
        size = 1 + self._api.ranks
        both_cuda = self._device.type == self._api.device.type == "cuda"
        backend, device = ("nccl", "cuda") if both_cuda else ("gloo", "cpu")
        # The prefix that torch gives the store keys of a group with this name on this kind of device.
        prefix = f"{self._group_name}/{self._group_name}//{device}/"

        def join() -> None:
            self._group = TransferGroup(host, 0, size, backend, self._device, prefix=prefix)

        run_both_sides(
            self._api.client,
            join,
            self._api.command,
            "/init_weights_update_group",
            master_address=host.address.host,
            master_port=host.address.port,
            rank_offset=1,
            world_size=size,
            group_name=self._group_name,
            backend=backend,
        )

    # ---------------------------------------------------------------- checksums

    def _add_checksum(self, name: str, tensor: torch.Tensor) -> None:
        may_be_padded = tensor.dim() > 1 and tensor.shape[0] % _VOCAB_MULTIPLE
        if self._comparable and self._api.ranks == 1 and not may_be_padded:
            flat = tensor.cpu().reshape(-1).view(torch.uint8)
            self._checksums[name] = hashlib.sha256(flat.numpy().data).hexdigest()
            if tensor.numel() > _MAX_CHECKED_ELEMENTS:
                self._large_names.add(name)

    def _compare_checksums(self) -> None:
        """Compare the checksums of weights that SGLang did not merge or rename."""
        skipped = sorted(self._large_names) if self._updates else []
        reply = self._api.command("/weights_checker", action="checksum", skip_tensor_list=skipped)
        reported: dict[str, str] = reply["ranks"][0]["checksums"]
        shared = sorted(self._checksums.keys() & reported.keys() - set(skipped))
        wrong = [name for name in shared if not self._checksums[name].startswith(reported[name])]
        if not self._updates and len(wrong) == len(shared):
            self._comparable = False
            # If all differ, a sync that lost all data cannot be distinguished from another hash.
            mismatch = "is the SHA-256 of the sent tensor (on GPUs SGLang uses another hash)"
            logger.warning(
                "rollout: no checksum of %s %s: its weights are only verified through its log-probs.",
                self._api.client.url,
                mismatch if shared else "has the name of a sent tensor",
            )
        elif wrong:
            raise WeightMismatchError(
                f"weights: {wrong[0]!r} at {self._api.client.url} differs from the sent tensor ({len(wrong)} of"
                f" {len(shared)} checksums differ). The weight sync lost or changed data."
            )
