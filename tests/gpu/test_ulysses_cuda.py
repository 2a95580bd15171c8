"""Sequence parallelism on CUDA: nccl carries the exchange, and the variable-length kernel takes what it brings.

One GPU holds one nccl rank, so the group here has one; groups of several: tests/distributed/test_ulysses.py.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def sharing():
    import torch.distributed as dist

    from verl.models.ulysses import SequenceParallel
    from verl.workers.engine.common.groups import ensure_process_group

    ensure_process_group(torch.device("cuda", 0))
    yield SequenceParallel(dist.group.WORLD, 1, 0)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_carries_heads_and_their_gradients(sharing, dtype):
    shapes = [(12, 4, 16), (12, 2, 16), (12, 2, 16)]
    tensors = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    exchanged = sharing.exchange(*tensors)
    assert all(torch.equal(found, given) for found, given in zip(exchanged, tensors, strict=True))
    whole = sharing.gather(sharing.restore(exchanged[0]), [12])
    weight = torch.randn_like(whole)
    (whole * weight).sum().backward()
    assert torch.equal(tensors[0].grad, weight)


def test_a_shared_pass_in_half_precision_is_the_packed_one(sharing):
    """Rows as a group of one shares them: the same kernels on the same tokens, sent through nccl."""
    from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss
    from tests.support.tiny import tiny_model

    found = []
    for shared in (False, True):
        engine = make_engine(tiny_model(), mixed_precision="bf16", device="cuda")
        if shared:
            engine.sequence_parallel = sharing
        fields = engine.infer(make_batch(), ["log_probs", "entropy"]).batch
        engine.forward_backward(make_batch(), token_loss, ["log_probs", "entropy"])
        found.append({**fields, **engine_gradients(engine)})
    plain, exchanged = found
    for name, value in plain.items():
        torch.testing.assert_close(exchanged[name], value, rtol=2e-2, atol=2e-2, msg=name)
