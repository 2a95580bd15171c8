"""Environment variables of every Ray worker of a run."""

from __future__ import annotations

import os
from typing import Any

# Defaults: a value that the user has set is passed to the workers instead.
_DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    # One bar per loaded model and rank would flood the log.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
# Passed on if set: workers on other nodes do not see the environment of this process.
_PASSED_ON = (
    "VERL_CACHE",
    "VERL_RUN",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_MODE",
)


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """Return the `runtime_env` for `ray.init`."""
    variables = {name: os.environ.get(name, default) for name, default in _DEFAULTS.items()}
    variables |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {"env_vars": variables}
