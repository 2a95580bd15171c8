"""The fused model's pointwise steps in plain torch, and its matmul in both orders."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from verl.inference.models import torch_ops


@pytest.mark.parametrize("rows", [1, 2, 33, 64, 65])
@pytest.mark.parametrize("shape", [(24, 16), (640, 512)], ids=["small weight", "large weight"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_matmul_is_linear_whichever_order_it_takes(rows, shape, has_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, shape[1]), torch.randn(shape)
    bias = torch.randn(shape[0]) if has_bias else None
    found = torch_ops.linear(x, weight, bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found, linear(x, weight, bias), atol=1e-3, rtol=1e-5)


def test_adding_before_the_norm_writes_the_sum_back():
    x, residual, weight = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]), torch.tensor([1.0, 2.0])
    # The sum is (3, 4); its root mean square is sqrt((9 + 16) / 2) = 3.5355.
    normed = torch_ops.add_rms_norm(x, residual, weight, 0.0)
    assert residual.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(normed, torch.tensor([[3 / 3.5355339, 2 * 4 / 3.5355339]]))


def test_a_rotation_by_a_quarter_turn_swaps_the_halves():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    assert torch_ops.rotated(x, cos, sin).tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
