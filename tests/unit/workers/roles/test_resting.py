"""Between their phases roles leave the device as the configuration says: after loading, and after every pass."""

import pytest
import torch

from verl.config import load_config
from verl.protocol import DataProto
from verl.workers.roles import policy, reward_model
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.roles.reward_model import RewardModelWorker

GIVEN = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.device=cpu", "reward_model.path=z"]
DATA = DataProto.from_dict({"response_mask": torch.ones(2, 3)}, meta_info={"temperature": 1.0})


class RestingEngine:
    """Says where it was sent."""

    dp_rank, dp_size, answers = 0, 1, True

    def __init__(self, *args, **kwargs):
        self.moves = []

    def to(self, device, model=True, optimizer=True):
        self.moves.append((device, model, optimizer))

    def base_weights(self):
        return torch.no_grad()

    def infer(self, data, outputs, *_):
        return DataProto.from_dict(
            {name: torch.zeros(2) if name == "scores" else torch.zeros(2, 3) for name in outputs}
        )


@pytest.fixture(autouse=True)
def resting(monkeypatch):
    for module in (policy, reward_model):
        monkeypatch.setattr(module, "make_engine", RestingEngine)
        monkeypatch.setattr(module, "resolve_model_path", lambda path, key: path)
    monkeypatch.setattr(reward_model, "hf_tokenizer", lambda *args, **kwargs: None)
    for worker in (ActorRolloutRefWorker, RewardModelWorker):
        monkeypatch.setattr(worker, "init_process_group", lambda self: None)
        monkeypatch.setattr(worker, "register_mesh_place", lambda self, *args, **kwargs: None)
        monkeypatch.setattr(worker, "device", torch.device("cpu"), raising=False)


@pytest.mark.parametrize("offloads", [True, False])
def test_the_reference_waits_in_host_memory_from_the_start(offloads):
    config = load_config(
        None, [*GIVEN, f"actor_rollout_ref.ref.fsdp_config.param_offload={offloads}"], check_files=False
    )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "ref")
    worker.init_model()
    away = [("cpu", True, False)] if offloads else []
    assert worker.ref_engine.moves == away
    worker.compute_ref_log_prob(DATA)
    assert worker.ref_engine.moves == [*away, ("device", True, False), *away]


@pytest.mark.parametrize("offloads", [True, False])
def test_the_reward_model_waits_in_host_memory_from_the_start(offloads):
    config = load_config(
        None, [*GIVEN, f"reward_model.fsdp_config.param_offload={offloads}", "reward_model.enable=True"],
        check_files=False,
    )  # fmt: skip
    config.reward_model.model.input_tokenizer = None
    worker = RewardModelWorker(config.reward_model)
    worker.init_model()
    away = [("cpu", True, False)] if offloads else []
    assert worker.engine.moves == away
    worker.compute_rm_score(DATA)
    assert worker.engine.moves == [*away, ("device", True, False), *away]
