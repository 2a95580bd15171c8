"""Megatron engines for tests, with the defaults of the FSDP engines in `engine_cases`."""

from __future__ import annotations

from typing import Any

from tests.support.engine_cases import DEVICE
from tests.support.tiny import STEADY_EPS
from verl.config import MegatronConfig, ModelConfig, OptimConfig, as_config

ACTOR = "actor_rollout_ref.actor"


def make_megatron(model: Any, kind: str = "causal_lm", train: bool = True, **changes: Any) -> Any:
    """A Megatron engine in float32. `changes`: keys of the optimizer, megatron or model block, or engine arguments."""
    from verl.workers.engine.megatron.engine import MegatronEngine

    values: dict[str, dict[str, Any]] = {
        "optim": {"lr": 1e-2, "eps": STEADY_EPS},
        "megatron_config": {"dtype": "fp32"},
        "model": {},
    }
    blocks = {"optim": OptimConfig, "megatron_config": MegatronConfig, "model": ModelConfig}
    for name, cls in blocks.items():
        values[name] |= {key: changes.pop(key) for key in list(changes) if key in cls.__dataclass_fields__}
    return MegatronEngine(
        model,
        kind,
        model_config=as_config(ModelConfig, {"path": "given", **values["model"]}),
        engine_config=as_config(MegatronConfig, values["megatron_config"], at=f"{ACTOR}.megatron_config"),
        optim=as_config(OptimConfig, values["optim"], at=f"{ACTOR}.optim") if train else None,
        **{"grad_clip": 1.0, "total_steps": 10, "device": DEVICE, **changes},
    )
