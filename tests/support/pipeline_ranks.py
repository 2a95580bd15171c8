"""The phases of every role on one rank, with any training engine (imported by name in the rank processes)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.support.engine_cases import make_batch
from verl.config import SFTConfig, load_config
from verl.config.names import TRAINING_ENGINES, TrainingEngine
from verl.protocol import DataProto
from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.roles.reward_model import RewardModelWorker
from verl.workers.roles.supervised import SFTWorker

STEADY = [f"{block}.optim.eps=1e-3" for block in ("actor_rollout_ref.actor", "critic")]


def run_stage(rank: int, ranks: int, folder: str) -> None:
    """Run the phases on PipelineEngine, registered in place of FSDP."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    entry = TrainingEngine("tests.support.pipeline_engine:PipelineEngine", "fsdp_config")
    TRAINING_ENGINES.update(fsdp=entry, fsdp2=entry)
    torch.save(phases(folder, f"{folder}/stages"), Path(folder) / f"results-{rank}.pt")


def phases(folder: str, checkpoints: str) -> dict[str, Any]:
    """Outputs of the methods of every role, and the final weights of training and rollout."""
    paths = [f"actor_rollout_ref.model.path={folder}/model", f"critic.model.path={folder}/model", "data.train_files=x"]
    paths += [
        f"reward_model.path={folder}/scorer",
        "reward_model.enable=True",
        "reward_model.model.input_tokenizer=null",
    ]
    sizes = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2"]
    config = load_config(None, [*paths, *sizes, *STEADY, "trainer.device=cpu"], check_files=False)
    return {
        **policy_phases(config, checkpoints),
        **critic_phases(config),
        **reward_phases(config),
        **sft_phases(folder, f"{checkpoints}-sft"),
    }


def batch() -> DataProto:
    data = make_batch(rows=5)
    data.batch["advantages"] = data.batch.pop("weights")
    data.meta_info = {"temperature": 1.0, "mini_batches": 1}
    return data


def policy_phases(config: Any, checkpoints: str) -> dict[str, Any]:
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout_ref")
    worker.init_model()
    results = {"old": worker.compute_log_prob(batch()), "ref": worker.compute_ref_log_prob(batch())}
    results["update"] = worker.update_actor(batch())
    worker.save_checkpoint(checkpoints)
    worker.update_rollout_weights(1)
    results["rollout weights"] = {name: value.clone() for name, value in worker.rollout.weights.items()}
    after = worker.compute_log_prob(batch())
    worker.update_actor(batch())
    worker.load_checkpoint(checkpoints)
    results |= {"after": after, "resumed": worker.compute_log_prob(batch())}
    results["places"] = [(place.dp_rank, place.collect) for place in map(worker.mesh_place, ("actor", "ref"))]
    worker.rollout.close()
    return results


def critic_phases(config: Any) -> dict[str, Any]:
    worker = CriticWorker(config.critic)
    worker.init_model()
    data = batch()
    shape = data.batch["responses"].shape
    data.batch["values"], data.batch["returns"] = torch.zeros(shape), torch.ones(shape)
    return {"critic": worker.update_critic(data), "values": worker.compute_values(data)}


def reward_phases(config: Any) -> dict[str, Any]:
    worker = RewardModelWorker(config.reward_model)
    worker.init_model()
    return {"scores": worker.compute_rm_score(batch())}


def sft_phases(folder: str, checkpoints: str) -> dict[str, Any]:
    overrides = [f"model.path={folder}/model", "data.train_files=x", "optim.eps=1e-3", "optim.total_training_steps=4"]
    config = load_config(None, [*overrides, "trainer.device=cpu"], check_files=False, root=SFTConfig)
    worker = SFTWorker(config)
    worker.init_model()
    results = {"sft": worker.train_batch(batch())}
    worker.save_checkpoint(checkpoints)
    results["evaluated"] = worker.evaluate(batch())
    worker.train_batch(batch())
    worker.load_checkpoint(checkpoints)
    return results | {"evaluated again": worker.evaluate(batch())}
