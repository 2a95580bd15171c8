"""The engines on a GPU: bfloat16, memory given back at the same addresses, noise equal to the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.tiny import tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.utils.counter_noise import gumbel_noise
from verl.utils.weight_fingerprint import fingerprints, tensor_fingerprint
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.embedded_rollout import EmbeddedRollout

pytestmark = pytest.mark.gpu


@pytest.fixture
def start_on_gpu(model_path, engine_name) -> Iterator[Callable[..., EmbeddedRollout]]:
    started: list[EmbeddedRollout] = []

    def start(dtype: torch.dtype | None = None, **keys) -> EmbeddedRollout:
        model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
        config = as_config(RolloutConfig, {"name": engine_name, "max_new_tokens": 24, "max_num_seqs": 16, **keys})
        started.append(get_rollout_class(engine_name)(str(model_path), model, config, "cuda", dtype))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def test_noise_is_the_cpus_to_the_last_place():
    keys, positions = torch.arange(-50, 50) * 10**15, torch.arange(100)
    here = gumbel_noise(keys, positions, 5000)
    torch.testing.assert_close(gumbel_noise(keys.cuda(), positions.cuda(), 5000).cpu(), here, rtol=2e-6, atol=2e-6)


def test_fingerprints_are_the_cpus():
    shapes = [(3,), (1000, 77), (1,), (70000,), (64, 64)]
    weights = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    weights |= {"slice": torch.randn(50, 40)[7:31], "odd": torch.randn(1001)[3:], "steps": torch.arange(9)}
    for dtype in (torch.float32, torch.bfloat16):
        found = fingerprints({name: tensor.cuda() for name, tensor in weights.items()}, dtype)
        assert found == {name: int(tensor_fingerprint(tensor, dtype)) for name, tensor in weights.items()}


def test_float32_samples_do_not_depend_on_the_batch(start_on_gpu, make_prompts):
    """Exact on one device; another device rounds otherwise, and near-ties may fall the other way."""
    prompts = make_prompts()
    engine = start_on_gpu(torch.float32)
    whole = engine.generate_sequences(prompts, pad_to_max=True).batch["responses"]
    halves = [engine.generate_sequences(part, pad_to_max=True).batch["responses"] for part in prompts.split(2)]
    assert torch.equal(torch.cat(halves), whole)


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights", "kv_cache"]])
def test_a_release_gives_memory_back_and_the_samples_come_again(start_on_gpu, make_prompts, tags):
    engine = start_on_gpu(free_weights=False)
    assert engine.weight_dtype == torch.bfloat16
    before = engine.generate_sequences(make_prompts()).batch
    addresses = [tensor.data_ptr() for tensor in engine.weights.values()]
    held = torch.cuda.mem_get_info()[0]
    engine.release(tags)
    freed = torch.cuda.mem_get_info()[0] - held
    kv = 0 if engine.kv is None else engine.kv.region.size
    weights = sum(tensor.nbytes for tensor in engine.weights.values()) if "weights" in tags else 0
    assert freed >= kv + weights
    engine.resume()
    assert [tensor.data_ptr() for tensor in engine.weights.values()] == addresses
    after = engine.generate_sequences(make_prompts()).batch
    assert torch.equal(after["responses"], before["responses"])


def test_weights_that_are_let_go_take_no_memory_and_come_back_to_their_addresses(start_on_gpu, make_prompts):
    engine = start_on_gpu(free_weights=True)
    before = engine.generate_sequences(make_prompts()).batch["responses"]
    weights = {name: tensor.clone() for name, tensor in engine.weights.items()}
    addresses, held = [tensor.data_ptr() for tensor in engine.weights.values()], torch.cuda.mem_get_info()[0]
    engine.release(["weights"])
    assert torch.cuda.mem_get_info()[0] - held >= sum(tensor.nbytes for tensor in weights.values())
    engine.update_weights(weights.items())
    assert [tensor.data_ptr() for tensor in engine.weights.values()] == addresses
    assert torch.equal(engine.generate_sequences(make_prompts()).batch["responses"], before)


def test_an_update_in_the_middle_of_a_generation_is_stamped_at_the_right_token(start_on_gpu, make_prompts):
    engine = start_on_gpu(torch.float32, ignore_eos=True, max_new_tokens=200, max_model_len=256)
    stream = engine.stream(make_prompts(rows=2))
    engine.update_weights(tiny_model(seed=1).state_dict().items())
    models = [tiny_model(seed=0), tiny_model(seed=1)]
    for _, sample in stream:
        versions = sample.batch["rollout_versions"][0]
        assert versions.tolist() == sorted(versions.tolist())
        prompt = sample.batch["prompts"].shape[1]
        with torch.no_grad():
            inputs = {name: sample.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
            logits = [model(**inputs).logits[0, prompt - 1 : -1].log_softmax(-1) for model in models]
        picked = sample.batch["responses"][0].unsqueeze(1)
        old, new = (part.gather(1, picked)[:, 0] for part in logits)
        expected = torch.where(versions == 0, old, new)
        torch.testing.assert_close(sample.batch["rollout_log_probs"][0], expected, atol=1e-3, rtol=1e-3)
