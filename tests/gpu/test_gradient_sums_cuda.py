"""Gradients of resharded layers on one GPU: added in place in float32, with the bits of fully_shard's reduction."""

from __future__ import annotations

import pytest
import torch

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss
from tests.support.tiny import tiny_model
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp import sharding

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 4095, 4097, 1_000_003])
def test_the_kernel_adds_like_torch(elements, dtype):
    from verl.workers.engine.fsdp.gradient_kernel import add_gradient

    torch.manual_seed(0)
    padded = torch.randn(elements + 8, device="cuda")
    gradient = torch.randn(elements, device="cuda").to(dtype)
    expected = torch.cat([padded[:elements] + gradient, padded[elements:]])
    add_gradient(padded[:elements], gradient)
    assert torch.equal(padded, expected), "and nothing behind the end changes"


def test_gradients_have_the_bits_of_a_reduction_per_micro_batch(monkeypatch):
    found = []
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr(sharding, "accumulate_in_place", lambda _: None)
        engine = make_engine(tiny_model(), mixed_precision="bf16", reshard_after_forward=True)
        engine.forward_backward(make_batch(), token_loss, ["log_probs"], micro=MicroBatching(size=1))
        found.append(engine_gradients(engine))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
