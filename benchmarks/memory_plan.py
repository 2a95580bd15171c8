"""The memory plan against the device: planned and measured peak of every phase, on the engine itself without Ray.

    python benchmarks/memory_plan.py            # a 0.5B shape with random weights, about a minute on one GPU
    python benchmarks/memory_plan.py --compile  # the same with compiled layers (half a minute more)

Measured is what torch allocated; the plan's figure is without the device's context and what is lost between blocks.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from _report import report
from _shapes import shape_config

from verl.config import FSDPConfig, ModelConfig, OptimConfig, as_config
from verl.models.heads import ValueModel
from verl.planning.costs import GB, TrainedModel
from verl.planning.shapes import ModelShape
from verl.protocol import DataProto
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp import FSDPEngine

SHAPE = "qwen2.5-0.5b"
PROMPT, ANSWER = 256, 768
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Case:
    """One configuration of the engine."""

    name: str
    tokens: int = 8192
    checkpointing: bool = False
    state_dtype: str = "fp32"
    grad_offload: bool = False
    reshard: bool | None = None
    compiled: bool = False


CASES = (
    Case("plain layers, 8k tokens"),
    Case("plain layers, layer by layer", reshard=True),
    Case("checkpointing, 8k tokens", checkpointing=True),
    Case("checkpointing, 32k tokens", tokens=32768, checkpointing=True),
    Case("bf16 moments", checkpointing=True, state_dtype="bf16"),
    Case("gradients offloaded", grad_offload=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--json", default=None, help="append the result to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/memory_plan.py measures a GPU's memory, and there is none here.")
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows += measure(replace(case, compiled=options.compile))
    rows += beside_a_critic(Case("a critic beside it", checkpointing=True, compiled=options.compile))
    report("memory plan: planned against measured peak, GB", rows, options.json)


def measure(case: Case) -> list[dict[str, Any]]:
    """Log-probs and an update; then log-probs with the optimizer offloaded."""
    baseline = torch.cuda.memory_allocated()
    engine, planned = build(case, "causal_lm")
    data, micro = batch(case.tokens), MicroBatching(max_tokens=case.tokens)
    answers = case.tokens * ANSWER // (PROMPT + ANSWER)
    update(engine, data, "log_probs", micro)  # moments exist from now on; compiled layers are compiled
    rest = planned.weights() + planned.moments()
    found = []

    def row(phase: str, plan: float, *, work: Any) -> None:
        found.append(compare(case.name, phase, plan, peak(work) - baseline))

    inference = sum(planned.inference(case.tokens, answers).values())
    row("old_log_prob", rest + inference, work=lambda: engine.infer(data, ["log_probs", "entropy"], micro=micro))
    plan = rest + sum(planned.update(case.tokens, answers, several=True).values())
    row("update_actor", plan, work=lambda: update(engine, data, "log_probs", micro))
    engine.to("cpu", model=False)
    row(
        "old_log_prob, offload",
        planned.weights() + inference,
        work=lambda: engine.infer(data, ["log_probs"], micro=micro),
    )
    engine.to("cpu")
    found.append(compare(case.name, "all offloaded", 0.0, torch.cuda.memory_allocated() - baseline))
    return found


def beside_a_critic(case: Case) -> list[dict[str, Any]]:
    """Both on one device: each other's weights and moments count."""
    baseline = torch.cuda.memory_allocated()
    (actor, planned), (critic, planned_critic) = build(case, "causal_lm"), build(case, "value")
    data, micro = batch(case.tokens), MicroBatching(max_tokens=case.tokens)
    answers = case.tokens * ANSWER // (PROMPT + ANSWER)
    engines = {"update_actor": (actor, planned, "log_probs"), "update_critic": (critic, planned_critic, "values")}
    for engine, _, field in engines.values():
        update(engine, data, field, micro)
    rest = sum(model.weights() + model.moments() for model in (planned, planned_critic))
    found = []
    for phase, (engine, model, field) in engines.items():
        plan = rest + sum(model.update(case.tokens, answers, several=True).values())
        measured = peak(lambda engine=engine, field=field: update(engine, data, field, micro)) - baseline
        found.append(compare(case.name, phase, plan, measured))
    return found


def build(case: Case, kind: str) -> tuple[FSDPEngine, TrainedModel]:
    from transformers import AutoModelForCausalLM

    config = shape_config(SHAPE)
    with torch.device("cuda"):
        source: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if kind == "value":
        source = ValueModel(source.base_model).to("cuda")
    fsdp = {"reshard_after_forward": case.reshard, "grad_offload": case.grad_offload, "mixed_precision": "bf16"}
    optim = {"lr": 1e-6, "state_dtype": case.state_dtype}
    engine = FSDPEngine(
        source,
        kind,  # type: ignore[arg-type]
        model_config=as_config(ModelConfig, {"path": "given", "enable_gradient_checkpointing": case.checkpointing}),
        engine_config=as_config(FSDPConfig, fsdp, at=f"{ACTOR}.fsdp_config"),
        optim=as_config(OptimConfig, optim, at=f"{ACTOR}.optim"),
        grad_clip=1.0,
        device="cuda",
        compile_layers=case.compiled,
    )
    del source
    clean()
    shape = ModelShape.of_config(config.to_dict())
    assert shape is not None
    return engine, TrainedModel(
        shape,
        kind,
        checkpointing=case.checkpointing,
        compiled=case.compiled,
        reshard=case.reshard,
        state_bytes=2 if case.state_dtype == "bf16" else 4,
        grad_offload=case.grad_offload,
    )


def batch(tokens: int) -> DataProto:
    """Two micro-batches of this many tokens, all rows of full length."""
    rows, width = 2 * tokens // (PROMPT + ANSWER), PROMPT + ANSWER
    ids = torch.randint(
        5, shape_config(SHAPE).vocab_size - 1, (rows, width), generator=torch.Generator().manual_seed(0)
    )
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
            "responses": ids[:, PROMPT:],
            "response_mask": ones[:, PROMPT:],
        }
    )


def update(engine: FSDPEngine, data: DataProto, field: str, micro: MicroBatching) -> None:
    engine.forward_backward(data, _mean_of(field), [field], micro=micro)
    engine.optimizer_step()


def _mean_of(field: str) -> Any:
    def loss(output: Mapping[str, torch.Tensor], part: DataProto, counts: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return -output[field].sum() / counts.tokens, {}

    return loss


def peak(work: Any) -> int:
    clean()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated()


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def compare(case: str, phase: str, planned: float, measured: float) -> dict[str, Any]:
    ratio = planned / measured if planned and measured > 0 else None
    row = {"case": case, "phase": phase, "planned": planned / GB, "measured": measured / GB, "ratio": ratio}
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
