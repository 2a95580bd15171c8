"""Training runs of a tiny MoE model whose routers may change between generation and update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.router_cases import CHOSEN, EXPERTS, FAMILIES, LAYERS
from tests.support.training_harness import make_task, overrides, policy_worker
from verl.models.routing import routers
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

REPLAY = "actor_rollout_ref.actor.router_replay.mode"


def moe_task(folder: Path) -> dict[str, str]:
    """A task with an MoE model in which the choice of experts matters: large experts, uneven routers."""
    changes = {**FAMILIES["qwen3_moe"], "num_hidden_layers": LAYERS}
    task = make_task(folder, family="qwen3_moe", **changes)
    model = AutoModelForCausalLM.from_pretrained(task["model"])
    with torch.no_grad():
        for router in routers(model).values():
            torch.nn.init.normal_(router.weight, std=0.5)
        for name, weight in model.named_parameters():
            weight.mul_(10.0 if ".experts." in name else 1.0)
    model.save_pretrained(task["model"])
    return task


def moe_overrides(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    """One training step of GRPO: two mini-batches, two passes over each."""
    return overrides(
        task,
        folder,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200",
        "trainer.total_training_steps=1",
        *more,
    )


class RouterChangingTrainer(RayPPOTrainer):
    """Re-initializes the actor's routers after each generation: without replay tokens go to other experts."""

    def _generate_and_score(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        batch = super()._generate_and_score(prompts, metrics)
        self.actor = policy_worker(self.actor_wg).engine
        generator = torch.Generator().manual_seed(5)
        for weight in self._routers():
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.data.copy_(0.5 * torch.randn(local.shape, generator=generator))
        return batch

    def _routers(self) -> list[Any]:
        """Router weights of an FSDP or Megatron engine."""
        model = self.actor.model if hasattr(self.actor, "model") else self.actor.models[0]
        ends = (".gate.weight", ".router.weight")
        return [weight for name, weight in model.named_parameters() if name.endswith(ends)]

    def expert_choices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[recorded choices, k]: the experts recorded in the last batch, and those that the actor uses for it now."""
        recorded = self.last_batch.batch["routed_experts"]
        assert recorded.shape[1:] == (self.last_batch.batch["attention_mask"].shape[1], LAYERS, CHOSEN)
        replayed = self.actor.infer(self.last_batch, ["log_probs", "routed_experts"]).batch["routed_experts"]
        is_recorded = (recorded < EXPERTS).all(dim=-1)
        return recorded[is_recorded], replayed[is_recorded]
