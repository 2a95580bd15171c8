"""Worker functions of the tests of tensor-parallel rollout engines (imported by name in the rank processes)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.requests import requests_of
from tests.support.tiny import tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.tensor_parallel import FollowerEngine
from verl.protocol import DataProto, object_array
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.rollout.prompts import sampling_params


def make_rollout(path: str, **keys: Any) -> NativeRollout:
    config = as_config(RolloutConfig, {"max_new_tokens": 12, "max_num_seqs": 6, "max_model_len": 64, **keys})
    return NativeRollout(path, as_config(ModelConfig, {"path": path}), config)


def make_prompts(rows: int = 8) -> DataProto:
    """Left-padded prompts of different lengths, two rows each."""
    torch.manual_seed(3)
    width = 9
    ids = torch.randint(5, 260, (rows // 2, width)).repeat_interleave(2, dim=0)
    lengths = torch.tensor([3, 9, 5, 7][: rows // 2]).repeat_interleave(2)
    mask = (torch.arange(width) >= width - lengths.unsqueeze(1)).long()
    batch = DataProto.from_dict({"input_ids": ids * mask, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1})
    batch.non_tensor_batch["uid"] = object_array([str(row // 2) for row in range(rows)])
    batch.meta_info = {"seed": 5, "step": 1}
    return batch


def generate(rollout: NativeRollout) -> dict[str, torch.Tensor] | None:
    """Generated columns on the first rank of an engine; None on the others."""
    result = rollout.generate_sequences(make_prompts())
    return dict(result.batch.items()) if len(result) else None


def generate_by_requests(rollout: NativeRollout, weights: dict[str, torch.Tensor]) -> list[list[int]] | None:
    """Responses by requests, as agents generate. Generation is paused on all ranks for a barrier and an update with the
    same `weights`, and resumed."""
    prompts, host = make_prompts(), EngineHost(rollout)
    if isinstance(rollout.loop, FollowerEngine):
        results = None
    else:
        requests = requests_of(prompts, sampling_params(rollout.config, {}, rollout.eos_token_ids), seed=5)
        host.submit_requests("agents", requests)
    rollout.pause_generation("keep")
    rollout.wait_idle()
    dist.barrier()
    rollout.update_weights(weights.items(), version=0)
    rollout.resume_generation()
    if not isinstance(rollout.loop, FollowerEngine):
        answers: dict[str, list[int]] = {}
        while len(answers) < len(requests):
            collected = host.collect_outputs("agents", timeout=60).outputs
            answers |= {item.id: item.output.token_ids for item in collected if item.output is not None}
        results = [answers[request.id] for request in requests]
    host.close()
    rollout.wait_idle()
    return results


def weights_of(family: str, seed: int, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    return tiny_model(family, seed, **changes).state_dict()


def run_rank(rank: int, world: int, port: int, ranks: int, family: str, changes: dict[str, Any], folder: str) -> None:
    """Generate, update weights, release and resume memory, generate; then an update with swapped heads must fail."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    rollout = make_rollout(f"{folder}/model", tensor_model_parallel_size=ranks)
    old = weights_of(family, 0, changes)
    results: dict[str, Any] = {"requests": generate_by_requests(rollout, old), "first": generate(rollout)}
    new = weights_of(family, 7, changes)
    for version in (1, 2):
        rollout.begin_update(version, new)
        rollout.load_bucket(new)
        rollout.finish_update(fingerprints(new, torch.float32))
        rollout.release(["kv_cache"])
        time.sleep(0.3 * (rank % ranks))  # the first rank submits while the others still have no memory
        rollout.resume()
        results[f"updated {version}"] = generate(rollout)
    try:
        name = "model.layers.0.self_attn.k_proj.weight"
        rollout.begin_update(3, new)
        rollout.load_bucket(new | {name: new[name].roll(len(new[name]) // 2, 0)})
        rollout.finish_update(fingerprints(new, torch.float32))
    except Exception as error:
        results["rejected"] = f"{type(error).__name__}: {error}"
    torch.save(results, Path(folder) / f"results-{rank}.pt")
    rollout.close()
    dist.barrier()
    dist.destroy_process_group()
