"""ServedRewardModelWorker: a reward model behind HTTP, for reward functions (such as an LLM judge)."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from verl.config import RewardModelConfig, as_config
from verl.inference.serving import options_parser
from verl.inference.serving.program import load_app
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.fs import resolve_model_path
from verl.utils.http_server.server import ConnectionLimits, serve_in_thread
from verl.utils.network import own_address
from verl.workers.roles.training import explain_out_of_memory

# Maximum number of connections to one rank, from all scorer processes together.
_MAX_CONNECTIONS = 8192


class ServedRewardModelWorker(Worker):
    """One rank with a copy of the model: a causal LM behind /v1/chat/completions, a classifier behind /v1/rewards."""

    def __init__(self, config: Any) -> None:
        self.config = as_config(RewardModelConfig, config)
        self._resources = contextlib.ExitStack()
        """The server and what it uses, until the process ends: shutting down the worker group kills it."""
        self._offloaded = False
        self._address = ""
        self._key = secrets.token_hex(16)
        self._served: Any = None
        """HTTP application and model (result of `load_app`); None before `init_model`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("judge", config_root="reward_model")
    def init_model(self) -> None:
        """Load the model and serve it until the process ends."""
        if self._address:
            return  # `init_model` runs on all ranks when one was restarted; this one still serves the model
        config, rollout = self.config, self.config.rollout
        if config.path is None:
            raise ValueError(
                "reward_model.path is not set. Set it to the folder or Hugging Face name of the reward model."
            )
        path = resolve_model_path(config.path, "reward_model.path")
        settings = {
            "model": path,
            "device": self.device,
            "dtype": rollout.dtype,
            "max-num-seqs": rollout.max_num_seqs,
            "gpu-memory-utilization": rollout.gpu_memory_utilization,
            **({} if rollout.max_model_len is None else {"max-model-len": rollout.max_model_len}),
        }
        # Parsed as a command line of `verl.inference.server`, so that all other options have its defaults.
        flags = {"--enforce-eager": rollout.enforce_eager, "--trust-remote-code": config.model.trust_remote_code}
        arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        arguments += [flag for flag, enabled in flags.items() if enabled]
        options = options_parser().parse_args(arguments)
        options.api_key = self._key
        self._served = load_app(options, self._resources)
        host = own_address()
        limits = ConnectionLimits(connections=_MAX_CONNECTIONS)
        serving = serve_in_thread(self._served.app, self._served.description, host, limits)
        port = self._resources.enter_context(serving)
        self._address = f"{host}:{port}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address(self) -> tuple[str, str]:
        """Return `host:port`, reachable from other machines, and the API key that requests need."""
        return self._address, self._key

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Release the device memory; requests wait until `onload`."""
        if not self._offloaded:
            self._served.offload()
            self._offloaded = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("judge", config_root="reward_model")
    def onload(self) -> None:
        """Allocate the device memory again and serve waiting requests."""
        if self._offloaded:
            self._served.onload()
            self._offloaded = False
