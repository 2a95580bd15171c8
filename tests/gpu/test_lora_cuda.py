"""LoRA in bfloat16 on a real GPU: what it holds in memory, its reference, and gradients beside float32's."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss
from tests.support.lora_cases import adapter_values, lora_engine, perturb_lora_b, train_steps
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
DATA = make_batch()
HALF = {"mixed_precision": "bf16"}


def allocated():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def allocate_workspaces():
    """Those of cuBLAS, which stay: one of each thread that multiplies matrices."""
    x = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()


def log_probs(engine):
    return engine.infer(DATA, ["log_probs"]).batch["log_probs"]


def test_a_frozen_weight_takes_two_bytes_and_only_adapters_have_gradients_and_moments():
    allocate_workspaces()
    before = allocated()
    engine = lora_engine(tiny_model(**SIZES), **HALF)
    train_steps(engine, DATA, 1)
    held = allocated() - before
    learning = sum(value.numel() for value in adapter_values(engine).values())
    weights = sum(torch.Size(spec.shape).numel() for spec in engine.manifest().values())
    # Master, two moments, and the last step's room: 16 bytes for what learns.
    assert held < 2.1 * weights + 16 * learning + 40 * 2**20


def test_without_adapters_it_is_the_frozen_model_bit_for_bit():
    model = tiny_model(**SIZES)
    engine, frozen = lora_engine(model, **HALF), make_engine(model, train=False, **HALF)
    assert torch.equal(log_probs(engine), log_probs(frozen))
    train_steps(engine, DATA, 2)
    with engine.base_weights():
        assert torch.equal(log_probs(engine), log_probs(frozen))
    assert not torch.equal(log_probs(engine), log_probs(frozen))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_in_half_precision_point_where_those_of_float32_do(checkpointing):
    found = []
    for precision in ("bf16", "fp32"):
        engine = lora_engine(
            tiny_model(**SIZES), mixed_precision=precision, enable_gradient_checkpointing=checkpointing
        )
        perturb_lora_b(engine)
        engine.forward_backward(DATA, token_loss, ["log_probs"])
        found.append(engine_gradients(engine))
    for name, wanted in found[1].items():
        cosine = torch.nn.functional.cosine_similarity(found[0][name].flatten(), wanted.flatten(), dim=0)
        assert cosine > 0.98, name
