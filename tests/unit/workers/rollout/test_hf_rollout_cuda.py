"""The same engine on a GPU: bfloat16, memory given back, noise equal to the CPU's."""

from __future__ import annotations

import pytest
import torch

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.utils.counter_noise import gumbel_noise
from verl.workers.rollout.hf_rollout import HFRollout

pytestmark = pytest.mark.gpu


@pytest.fixture
def engine(model_path):
    model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"name": "hf", "max_new_tokens": 24})
    with HFRollout(str(model_path), model, config, device="cuda") as engine:
        yield engine


def test_noise_is_the_cpus_to_the_last_place():
    keys, positions = torch.arange(-50, 50) * 10**15, torch.arange(100)
    here = gumbel_noise(keys, positions, 5000)
    torch.testing.assert_close(gumbel_noise(keys.cuda(), positions.cuda(), 5000).cpu(), here, rtol=2e-6, atol=2e-6)


def test_float32_samples_do_not_depend_on_the_batch(make_prompts, model_path):
    """Exact on one device; another device rounds otherwise, and near-ties may fall the other way."""
    model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"name": "hf", "max_new_tokens": 24})
    prompts = make_prompts()
    with HFRollout(str(model_path), model, config, device="cuda", dtype=torch.float32) as engine:
        whole = engine.generate_sequences(prompts, pad_to_max=True).batch["responses"]
        halves = [engine.generate_sequences(part, pad_to_max=True).batch["responses"] for part in prompts.split(2)]
    assert torch.equal(torch.cat(halves), whole)


def test_release_gives_the_weights_memory_back_and_resume_restores_the_samples(engine, make_prompts):
    assert engine.weight_dtype == torch.bfloat16
    before = engine.generate_sequences(make_prompts()).batch
    held = torch.cuda.memory_allocated()
    size = sum(parameter.nbytes for parameter in engine.model.parameters())
    engine.release()
    assert torch.cuda.memory_allocated() <= held - size
    engine.resume()
    after = engine.generate_sequences(make_prompts()).batch
    assert torch.equal(after["responses"], before["responses"])
