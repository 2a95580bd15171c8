"""Between phases roles leave the device as the engine's configuration says: after loading, passes and failures."""

import pytest
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from tests.support.engine_cases import make_batch
from tests.support.tiny import save_tiny_model, tiny_config
from verl.config import load_config
from verl.config.names import TRAINING_ENGINES, TrainingEngine
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.roles.critic import CriticWorker
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.roles.reward_model import RewardModelWorker


class WatchedEngine(FSDPEngine):
    """Says where it was sent; can be told to fail."""

    broken = False

    def __init__(self, *args, **kwargs):
        self.moves = []
        super().__init__(*args, **kwargs)

    def to(self, device, model=True, optimizer=True):
        self.moves.append((device, model, optimizer))
        super().to(device, model, optimizer)

    def infer(self, *args, **kwargs):
        if self.broken:
            raise RuntimeError("broken")
        return super().infer(*args, **kwargs)


@pytest.fixture
def start(monkeypatch, tmp_path):
    monkeypatch.setitem(TRAINING_ENGINES, "fsdp", TrainingEngine(f"{__name__}:WatchedEngine", "fsdp_config"))
    path, scorer = save_tiny_model(tmp_path / "model"), tmp_path / "scorer"
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(scorer)

    def make(block, role, rollout=None, **offloads):
        changes = [f"{block}.fsdp_config.{name}={value}" for name, value in offloads.items()]
        changes += [f"actor_rollout_ref.rollout.{rollout}"] if rollout else []
        paths = [f"actor_rollout_ref.model.path={path}", f"critic.model.path={path}", "data.train_files=x"]
        paths += [f"reward_model.path={scorer}", "reward_model.enable=True", "reward_model.model.input_tokenizer=null"]
        config = load_config(None, [*paths, "trainer.device=cpu", *changes], check_files=False)
        if role == "reward_model":
            worker = RewardModelWorker(config.reward_model)
        elif role == "critic":
            worker = CriticWorker(config.critic)
        else:
            worker = ActorRolloutRefWorker(config.actor_rollout_ref, role)
        worker.init_model()
        return worker

    yield make
    dist.destroy_process_group()


PHASES = {
    "reference": ("actor_rollout_ref.ref", "ref", "ref_engine", "compute_ref_log_prob"),
    "actor": ("actor_rollout_ref.actor", "actor", "engine", "compute_log_prob"),
    "critic": ("critic", "critic", "engine", "compute_values"),
    "reward model": ("reward_model", "reward_model", "engine", "compute_rm_score"),
}


@pytest.mark.parametrize("offloads", [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize("name", PHASES)
def test_an_engine_waits_where_its_configuration_says_after_loading_a_pass_and_a_failure(start, name, offloads):
    block, role, attribute, method = PHASES[name]
    worker = start(block, role, **dict(zip(("param_offload", "optimizer_offload"), offloads, strict=True)))
    engine, data = getattr(worker, attribute), make_batch(rows=2)
    model, moments = offloads[0], offloads[1] and name in ("actor", "critic")
    parked = [("cpu", model, moments)] if model or moments else []
    assert engine.moves == parked
    getattr(worker, method)(data)
    assert engine.moves == [*parked, ("device", True, False), *parked]
    engine.moves, engine.broken = [], True
    with pytest.raises(RuntimeError, match="broken"):
        getattr(worker, method)(data)
    assert engine.moves == [("device", True, False), *parked]


@pytest.mark.parametrize("frees", [True, False])
def test_the_kv_cache_is_released_until_the_first_generation(start, frees):
    """The first weight sync loads the trainer's weights onto the device of the engine."""
    worker = start("actor_rollout_ref.actor", "actor_rollout", rollout=f"free_cache_engine={frees}")
    assert (worker.rollout.held_bytes()["kv_cache"] == 0) is frees
    worker.update_rollout_weights(1)
    assert (worker.rollout.held_bytes()["kv_cache"] == 0) is frees
    worker.begin_generation()
    assert worker.rollout.held_bytes()["kv_cache"] > 0
    worker.end_generation()
    assert (worker.rollout.held_bytes()["kv_cache"] == 0) is frees


def test_an_update_adds_no_column_to_the_batch_of_the_caller(start):
    worker, data = start("actor_rollout_ref.actor", "actor"), make_batch(rows=2)
    data.batch["advantages"] = data.batch.pop("weights")
    data.meta_info = {"temperature": 1.0, "mini_batches": 1}
    columns = set(data.batch.keys())
    assert "old_log_probs" in worker.update_actor(data).batch.keys()
    assert set(data.batch.keys()) == columns
