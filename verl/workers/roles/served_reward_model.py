"""ServedRewardModelWorker: the reward model answers requests over HTTP: those of a judge, or of a user's function."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from verl.config import RewardModelConfig, as_config
from verl.inference.server import app_of, options_parser
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.fs import resolve_model_path
from verl.utils.http_server.server import Limits, serve_in_thread
from verl.utils.network import own_address
from verl.workers.roles.memory import phase_memory

# Of all scorers together.
_CONNECTIONS = 8192


class ServedRewardModelWorker(Worker):
    """One rank, which serves a copy of the model: a causal one as /v1/chat/completions, a classifier as /v1/rewards."""

    def __init__(self, config: Any) -> None:
        self.config = as_config(RewardModelConfig, config)
        self._held = contextlib.ExitStack()
        self._parked = False
        self._address = ""
        self._key = secrets.token_hex(16)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @phase_memory("judge", at="reward_model")
    def init_model(self) -> None:
        """Load the model and serve it until the process ends."""
        if self._address:
            return  # it lives, and another was started anew
        config, rollout = self.config, self.config.rollout
        if config.path is None:
            raise ValueError("reward_model.path: not set. Give the folder or hub name of the judge.")
        path = resolve_model_path(config.path, "reward_model.path")
        asked = {
            "model": path,
            "device": self.device,
            "dtype": rollout.dtype,
            "max-num-seqs": rollout.max_num_seqs,
            "gpu-memory-utilization": rollout.gpu_memory_utilization,
            **({} if rollout.max_model_len is None else {"max-model-len": rollout.max_model_len}),
        }
        flags = {"--enforce-eager": rollout.enforce_eager, "--trust-remote-code": config.model.trust_remote_code}
        options = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
        options += [flag for flag, on in flags.items() if on]
        parsed = options_parser().parse_args(options)
        parsed.api_key = self._key
        self._served = app_of(parsed, self._held)
        host = own_address()
        serving = serve_in_thread(self._served.app, self._served.what, host, Limits(connections=_CONNECTIONS))
        self._address = f"{host}:{self._held.enter_context(serving)}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address(self) -> tuple[str, str]:
        """host:port, and the key that it wants to be sent: other machines reach it, too."""
        return self._address, self._key

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def park(self) -> None:
        """Give the device's memory to others; requests wait."""
        if not self._parked:
            self._served.park()
            self._parked = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @phase_memory("judge", at="reward_model")
    def wake(self) -> None:
        """Take it again, and answer."""
        if self._parked:
            self._served.wake()
            self._parked = False

    def close(self) -> None:
        self._held.close()
