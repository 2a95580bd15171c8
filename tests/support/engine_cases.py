"""Batches, FSDP engines and references computed by transformers for the tests of training engines."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.support.tiny import STEADY_EPS, tiny_config, tiny_model
from verl.config import FSDPConfig, ModelConfig, OptimConfig, as_config
from verl.models.loading import ValueModel
from verl.protocol import DataProto
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp import FSDPEngine

ACTOR = "actor_rollout_ref.actor"
_MODEL_CODE = [f"transformers.models.{family}.modeling_{family}" for family in ("qwen2", "llama", "mistral")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


OUTPUTS_OF_KIND = {
    "causal_lm": ["log_probs", "entropy", "other_log_probs"],
    "value": ["values", "last_value"],
    "sequence_classification": ["scores"],
}


def model_of_kind(kind: str, family: str = "qwen2", **changes: Any) -> Any:
    """A tiny model of this kind, with a randomly initialized head."""
    if kind == "causal_lm":
        return tiny_model(family, **changes)
    torch.manual_seed(1)
    if kind == "value":
        model = ValueModel(tiny_model(family, **changes).base_model)
        torch.nn.init.normal_(model.score.weight)
        return model
    from transformers import AutoModelForSequenceClassification

    config = tiny_config(family, **{"num_labels": 1, **changes})
    return AutoModelForSequenceClassification.from_config(config).float().eval()


def fields_by_batching(
    engine: Any, data: DataProto, batchings: dict[str, MicroBatching]
) -> dict[str, dict[str, torch.Tensor]]:
    """All outputs of a model at temperature 0.7 for each micro-batching; {} on ranks that return none."""
    outputs = OUTPUTS_OF_KIND[engine.kind]
    batches = {name: engine.infer(data, outputs, 0.7, micro).batch for name, micro in batchings.items()}
    return {name: {} if fields is None else dict(fields.items()) for name, fields in batches.items()}


def make_engine(model: Any, kind: str = "causal_lm", train: bool = True, **changes: Any) -> FSDPEngine:
    """An FSDP engine in float32. `changes`: keys of the optimizer, fsdp or model block, or arguments of the engine."""
    blocks_of_role = {"optim": OptimConfig, "fsdp_config": FSDPConfig}
    values: dict[str, dict[str, Any]] = {
        "optim": {"lr": 1e-2, "eps": STEADY_EPS},
        "fsdp_config": {"mixed_precision": "fp32"},
        "model": {},
    }
    for name, cls in {**blocks_of_role, "model": ModelConfig}.items():
        values[name] |= {key: changes.pop(key) for key in list(changes) if key in cls.__dataclass_fields__}
    blocks = {name: as_config(cls, values[name], at=f"{ACTOR}.{name}") for name, cls in blocks_of_role.items()}
    return FSDPEngine(
        model,
        kind,
        model_config=as_config(ModelConfig, {"path": "given", **values["model"]}),
        engine_config=blocks["fsdp_config"],
        optim=blocks["optim"] if train else None,
        **{"grad_clip": 1.0, "total_steps": 10, "device": DEVICE, **changes},
    )


def make_batch(
    rows: int = 6, prompt: int = 7, response: int = 9, seed: int = 0, vocab: int = 264, extra_prompt: int = 0
) -> DataProto:
    """Left-padded prompts of 2..prompt tokens, right-padded responses of 1..response; padding holds random ids.

    `extra_prompt` widens the padding only: the same tokens in every row.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocab, (rows, prompt + response), generator=generator)
    prompt_lengths = torch.randint(2, prompt + 1, (rows, 1), generator=generator)
    response_lengths = torch.randint(1, response + 1, (rows, 1), generator=generator)
    mask = torch.cat(
        [torch.arange(prompt) >= prompt - prompt_lengths, torch.arange(response) < response_lengths], dim=1
    )
    sampled = mask[:, prompt:] & (torch.rand((rows, response), generator=generator) < 0.8)
    weights = torch.randn((rows, response), generator=generator)
    widen = (extra_prompt, 0)
    ids = torch.nn.functional.pad(ids, widen, value=99)
    mask = torch.nn.functional.pad(mask, widen, value=False)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, : prompt + extra_prompt],
        "responses": ids[:, prompt + extra_prompt :],
        "response_mask": sampled.long(),
        "weights": weights,
        "teacher_top_ids": torch.randint(5, vocab, (rows, response, 3), generator=generator, dtype=torch.int32),
    }
    return DataProto.from_dict(tensors)


def token_loss(outputs: dict[str, torch.Tensor], batch: DataProto, counts: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A weighted sum of every output over sampled tokens (or over rows), divided by the global number of tokens."""
    mask = batch.batch["response_mask"].bool()
    rows = [out for out in outputs.values() if out.dim() == 1]
    tokens = [out for out in outputs.values() if out.dim() == 2]
    tokens += [part for out in outputs.values() if out.dim() > 2 for part in out.unbind(2)]
    value = sum(torch.where(mask, out * batch.batch["weights"] + out**2, 0.0).sum() for out in tokens)
    value = sum(((out**2).sum() for out in rows), start=value)
    return value / counts.tokens, {"loss": (value / counts.tokens, 1.0), "tokens": (mask.sum(), counts.tokens)}


def plain_fields(model: Any, data: DataProto, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """log_probs and entropy [B, R] by transformers alone, row by row without any padding."""
    width = data.batch["responses"].shape[1]
    rows: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
    for ids, mask in zip(data.batch["input_ids"], data.batch["attention_mask"].bool(), strict=True):
        length = int(mask[-width:].sum())
        tokens = ids[mask]
        logits = model(input_ids=tokens[None]).logits[0].float() / temperature
        log_p = torch.log_softmax(logits[-length - 1 : -1], dim=-1)
        picked = log_p.gather(1, tokens[-length:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        pad = (0, width - length)
        rows["log_probs"].append(torch.nn.functional.pad(picked, pad))
        rows["entropy"].append(torch.nn.functional.pad(entropy, pad))
    return {name: torch.stack(values) for name, values in rows.items()}


def plain_gradients(family: str, data: DataProto, temperature: float = 1.0, **changes: Any) -> dict[str, torch.Tensor]:
    """Gradients of `token_loss` over all of `data`, by transformers alone."""
    return model_gradients(tiny_model(family, **changes), data, temperature)


def model_gradients(model: Any, data: DataProto, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients of `token_loss` over all of `data` for this model, by transformers alone."""
    mask = data.batch["response_mask"]
    from verl.workers.engine.base import Counts

    counts = Counts(float(mask.sum()), float(mask.any(1).sum()))
    token_loss(plain_fields(model, data, temperature), data, counts)[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def engine_gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Unsharded gradients by Hugging Face name, on the CPU."""
    return {
        name: parameter.grad.full_tensor().cpu()
        for name, parameter in engine.model.hf.named_parameters()
        if parameter.grad is not None
    }


def whole_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Unsharded weights by Hugging Face name, copied to the CPU."""
    return {name: value.cpu().clone() for bucket in engine.buckets(None, 2**30) for name, value in bucket.items()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    """Compare tensors by name. Rounding errors of a sum grow with its largest terms: those of a value model's
    gradient reach 2,000."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        largest = float(value.abs().max()) if value.numel() and value.is_floating_point() else 0.0
        atol = max(tolerance, 2e-6 * largest)
        torch.testing.assert_close(
            actual[name], value, atol=atol, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def run_ranks(work: Any, folder: Any, *arguments: Any, ranks: int = 2) -> None:
    """Run `work(rank, ranks, folder, *arguments)` in processes that form a gloo process group."""
    fork_ranks(_run_in_group, (work, ranks, str(folder), arguments), ranks, work.__module__)


def fork_ranks(work: Any, arguments: tuple[Any, ...], ranks: int, module: str) -> None:
    """Run `work(rank, *arguments)` in forked processes; `module` is imported before the fork."""
    # Imports dominate the start-up time of a rank: the fork server imports once for all ranks.
    multiprocessing.set_forkserver_preload([FSDPEngine.__module__, module, *_MODEL_CODE])
    mp.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")


def _run_in_group(rank: int, work: Any, ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/join-{ranks}", rank=rank, world_size=ranks)
    try:
        work(rank, ranks, folder, *arguments)
    finally:
        dist.destroy_process_group()
