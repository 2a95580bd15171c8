"""On a GPU: the Megatron engine on one rank finds, learns, saves and offloads as the FSDP engine does."""

import gc

import pytest
import torch

from tests.support.engine_cases import assert_close, make_batch, make_engine, token_loss, whole_weights
from tests.support.megatron_cases import make_megatron
from tests.support.megatron_ranks import EXPERTS
from tests.support.tiny import tiny_model
from verl.workers.engine.base import MicroBatching

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.gpu

BOTH = ["log_probs", "entropy"]
MICRO = MicroBatching(max_tokens=200)
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
MB = 2**20


def batch(rows=8):
    return make_batch(rows=rows, prompt=40, response=90)


def learned(engine, data, steps=3):
    """(loss, gradient norm) of every step."""
    found = []
    for _ in range(steps):
        loss = float(engine.forward_backward(data, token_loss, BOTH, 0.8, MICRO)["loss"][0])
        found.append((loss, engine.optimizer_step()["grad_norm"]))
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2e-3), ("bf16", 0.05)])
@pytest.mark.parametrize(
    "changes", [{}, {"enable_gradient_checkpointing": False}, {"use_distributed_optimizer": False}]
)
def test_one_rank_finds_and_learns_what_fsdp_does(dtype, tolerance, changes):
    data = batch()
    engines = (
        make_megatron(tiny_model(), lr=1e-3, dtype=dtype, **changes),
        make_engine(tiny_model(), lr=1e-3, mixed_precision=dtype),
    )
    fields = [engine.infer(data, BOTH, 0.8, MICRO).batch for engine in engines]
    for name in BOTH:
        assert (fields[0][name] - fields[1][name]).norm() <= tolerance * fields[1][name].norm(), name
    for found, wanted in zip(*(learned(engine, data) for engine in engines), strict=True):
        assert found == pytest.approx(wanted, rel=tolerance)
    weights = [whole_weights(engine) for engine in engines]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert (weights[0][name] - value).norm() <= tolerance * value.norm(), name


def test_experts_multiplied_together_are_those_one_after_the_other(monkeypatch):
    """Many experts for few tokens: some have none."""
    from verl.workers.engine.megatron.layers import GroupedExperts

    def mixture():
        return tiny_model("qwen3_moe", **EXPERTS | {"num_experts": 64})

    data = batch(2)
    together = make_megatron(mixture(), lr=1e-3, dtype="bf16")
    found = learned(together, data)
    assert learned(make_engine(mixture(), lr=1e-3, mixed_precision="bf16"), data) == [
        pytest.approx(each, rel=0.1) for each in found
    ]
    monkeypatch.setattr(GroupedExperts, "supports_grouped", lambda *_: False)
    assert learned(make_megatron(mixture(), lr=1e-3, dtype="bf16"), data) == [
        pytest.approx(each, rel=0.05) for each in found
    ]


def test_compiled_layers_learn_the_same_and_share_their_code():
    data, found, graphs = batch(), {}, []
    for compiled in (False, True):
        engine = make_megatron(tiny_model(num_hidden_layers=12), lr=1e-3, dtype="bf16", compile_layers=compiled)
        torch._dynamo.utils.counters.clear()
        found[compiled] = learned(engine, data)
        for rows in (4, 6, 5, 4, 6, 5):
            learned(engine, batch(rows), steps=1)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert engine.weights_finite(thorough=True)
    for ours, plain in zip(found[True], found[False], strict=True):
        assert ours == pytest.approx(plain, rel=0.05)
    assert graphs[0] == 0 < graphs[1] < 12, "layers share what is compiled"


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    data, engine = make_batch(), make_megatron(tiny_model(), lr=1e-3, dtype="bf16")
    learned(engine, data, steps=2)
    engine.save(tmp_path / "saved")
    wanted = learned(engine, data, steps=2)
    again = make_megatron(tiny_model(), lr=1e-3, dtype="bf16")
    again.load(tmp_path / "saved")
    assert learned(again, data, steps=2) == wanted
    assert_close(whole_weights(again), whole_weights(engine), tolerance=0.0)


def test_an_engine_that_was_offloaded_trains_bit_for_bit_as_one_that_stayed():
    data = make_batch()
    stayed, moved = (
        make_megatron(tiny_model(**SIZES), dtype="bf16", param_offload=away, optimizer_offload=away)
        for away in (False, True)
    )
    wanted, found = [], []
    for _ in range(3):
        wanted += learned(stayed, data, steps=1)
        with moved.on_device():
            found += learned(moved, data, steps=1)
    assert found == wanted
    assert_close(whole_weights(moved), whole_weights(stayed), tolerance=0.0)


def test_nothing_of_an_offloaded_engine_stays_on_the_device():
    learned(make_megatron(tiny_model(**SIZES), dtype="bf16"), batch())  # libraries take their workspaces
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = make_megatron(tiny_model(**SIZES), dtype="bf16", grad_offload=True)
    learned(engine, batch())
    parameters = sum(value.numel() for value in engine.models[0].parameters())
    # In half precision the weights, in float32 their masters and two moments.
    assert torch.cuda.memory_allocated() - before == pytest.approx(14 * parameters, rel=0.1)
    engine.to("cpu")
    assert torch.cuda.memory_allocated() - before < 40 * MB
    engine.to("device")
    learned(engine, batch())
