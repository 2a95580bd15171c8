"""Recorded and replayed experts agree with those of transformers on every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.engine_cases import assert_close, model_gradients, plain_fields, run_ranks
from tests.support.megatron_cases import make_megatron
from tests.support.megatron_ranks import EXPERTS_SHAPE, RANKS, model_of, replay_cases, rows, rows_of_dp_rank
from tests.support.moe_runs import RouterChangingTrainer, moe_overrides, moe_task
from tests.support.router_cases import UNKNOWN, hf_experts, random_experts, with_replayed_experts
from tests.support.training_harness import run_training
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.protocol import DataProto
from verl.workers.rollout.native_rollout import NativeRollout

pytestmark = pytest.mark.timeout(1800)
# Tokens shared by tensor ranks, by context ranks and by neither; layers by stages; experts by ranks.
LAYOUTS = ["EP2", "TP2 PP2", "CP2 EP2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("replay")
    run_ranks(replay_cases, folder, LAYOUTS, ranks=RANKS)
    return [torch.load(folder / f"replay-{rank}.pt", weights_only=False) for rank in range(RANKS)]


def collected(found: Any, layout: str) -> list[tuple[slice, dict[str, Any]]]:
    """The rows of each part, and what the rank that answers for them found."""
    ranks = [rank[layout] for rank in found]
    return [(rows_of_dp_rank(*rank["place"][:2]), rank) for rank in ranks if rank["place"][2]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_experts_are_those_of_transformers(found, layout):
    wanted = hf_experts(model_of("experts"), rows(), random_experts(rows(), *EXPERTS_SHAPE))
    for part, rank in collected(found, layout):
        recorded = rank["recorded"]["routed_experts"]
        assert recorded.dtype == torch.uint8
        assert torch.equal(recorded.sort(-1).values, wanted[part].sort(-1).values)
        assert (recorded[:, :, 1] == UNKNOWN).all(), "a dense layer"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_experts_determine_outputs_and_gradients(found, layout):
    experts, mask = random_experts(rows(), *EXPERTS_SHAPE), rows().batch["attention_mask"].bool()
    fields = plain_fields(with_replayed_experts(model_of("experts"), rows(), experts), rows(), 0.7)
    gradients = model_gradients(with_replayed_experts(model_of("experts"), rows(), experts), rows(), 0.7)
    for part, rank in collected(found, layout):
        assert_close(
            {name: rank["replayed"][name] for name in fields},
            {name: value[part] for name, value in fields.items()},
            1e-5,
        )
        known = (mask & (experts[:, :, 0, 0] != UNKNOWN))[part]
        for layer in (0, 2, 3):
            assert torch.equal(rank["replayed"]["routed_experts"][known][:, layer], experts[part][known][:, layer])
        assert 0.1 < rank["metrics"]["moe/replaced"][0] < 0.9
    for rank in found:
        for name, value in gradients.items():
            value = torch.zeros_like(rank[layout]["gradients"][name]) if value is None else value
            torch.testing.assert_close(
                rank[layout]["gradients"][name], value, atol=1e-5 * max(1.0, float(value.abs().max())), rtol=0.0
            )


def test_with_the_experts_of_the_generation_training_is_nearer_to_it(tmp_path):
    """The engine generates in bfloat16, where rounding chooses other experts than training does in float32."""
    model = model_of("unnormalized")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(20.0 if ".experts." in name else 1.0)  # which experts it is shall matter
    model.save_pretrained(tmp_path)
    keys = {"name": "native", "max_new_tokens": 16, "dtype": "bfloat16", "return_routed_experts": True}
    rollout = NativeRollout(
        str(tmp_path),
        as_config(ModelConfig, {"path": str(tmp_path)}, "actor_rollout_ref.model"),
        as_config(RolloutConfig, keys),
    )
    ids = torch.randint(5, 260, (16, 12), generator=torch.Generator().manual_seed(0))
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(12).expand(16, 12)}
    uids = {"uid": np.array([str(row) for row in range(16)], dtype=object)}
    try:
        batch = rollout.generate_sequences(DataProto.from_dict(asked, uids, {"eos_token_id": []}))
    finally:
        rollout.close()
    engine = make_megatron(model, train=False, router_replay=True)
    outputs = ["log_probs", "routed_experts"]
    alike = engine.infer(batch, outputs).batch
    experts = batch.batch.pop("routed_experts")
    alone = engine.infer(batch, outputs).batch
    dist.destroy_process_group()
    known = experts != UNKNOWN
    assert torch.equal(alike["routed_experts"][known], experts[known])
    assert (alone["routed_experts"].sort(-1).values != experts.sort(-1).values)[known].any()
    gaps = [(found["log_probs"] - batch.batch["rollout_log_probs"]).abs().mean() for found in (alike, alone)]
    assert gaps[0] < 0.8 * gaps[1]


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_in_a_whole_run_updates_go_through_experts_of_an_earlier_pass(tmp_path, mode):
    """With R3 also where the routers became others after the generation; with R2 while they learn."""
    changes = (
        "actor_rollout_ref.actor.strategy=megatron",
        f"actor_rollout_ref.actor.megatron.router_replay.mode={mode}",
    )
    more = () if mode == "R3" else ("actor_rollout_ref.actor.optim.lr=3e-2",)
    arguments = moe_overrides(moe_task(tmp_path), tmp_path, *changes, *more)
    trainer = run_training(arguments, None, RouterChangingTrainer if mode == "R3" else None)
    (row,) = trainer.history
    assert row["actor/moe/replaced"] > (0.05 if mode == "R3" else 0.01)
    assert row["rollout_corr/log_prob_diff"] > 0.0
    if mode == "R3":
        recorded, replayed = trainer.expert_choices()
        assert torch.equal(replayed, recorded)
