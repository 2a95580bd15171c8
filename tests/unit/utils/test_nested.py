"""Nested values: equality all the way down, and where two differ."""

import warnings

import numpy as np
import pytest
import torch

from verl.utils.nested import deep_equal, describe_difference, object_array, tensor_from_wire, tensor_to_wire

NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (NAN, NAN, True),
        (1, 1.0, True),
        (1, "1", False),
        ([1, [NAN]], [1, [NAN]], True),
        ([1], (1,), False),
        ([1], [1, 2], False),
        ({"a": NAN}, {"a": NAN}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, 0, False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN]), False),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor([NAN], dtype=torch.bfloat16), torch.tensor([NAN], dtype=torch.bfloat16), True),
        (torch.tensor([-0.0]), torch.tensor([0.0]), True),
        (torch.arange(21, dtype=torch.uint8), torch.arange(21, dtype=torch.uint8), True),
        (torch.arange(21, dtype=torch.uint8), torch.tensor([*range(20), 99], dtype=torch.uint8), False),
        (torch.arange(21, dtype=torch.uint8), torch.tensor([9, *range(1, 21)], dtype=torch.uint8), False),
        (torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]]), True),
        (torch.zeros(0, 3), torch.zeros(0, 3), True),
        (np.array([1.0, NAN]), np.array([1.0, NAN]), True),
        (np.array([1]), np.array([1.0]), False),
        (np.array(["a"]), np.array(["a"]), True),
        (np.array(["NaT"], dtype="datetime64[s]"), np.array(["NaT"], dtype="datetime64[s]"), True),
        (object_array([[1], np.array([NAN])]), object_array([[1], np.array([NAN])]), True),
        (object_array([[1], np.array([1])]), object_array([[1], np.array([2])]), False),
        (object_array([torch.zeros(2)]), object_array([torch.zeros(3)]), False),
    ],
)
def test_same_compares_all_the_way_down(a, b, equal):
    assert deep_equal(a, b) is equal
    assert deep_equal(b, a) is equal
    assert deep_equal(a, a) is True


def test_differences_are_described_by_type_or_by_row():
    assert describe_difference(torch.zeros(2), torch.zeros(3)) == "torch.float32 (2,) and torch.float32 (3,)"
    assert describe_difference(np.zeros(2), np.zeros(2, dtype=int)) == "float64 (2,) and int64 (2,)"
    assert describe_difference(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 2.0])) == "first in row 1"


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.uint16),
)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_survives(dtype):
    base = torch.arange(24).view(4, 6).to(torch.float32).to(dtype)
    for tensor in (base, base[1:3], base[::2], base.t(), base[:, 2:4], base[0], base[:1], base[1, 1]):
        received = tensor_from_wire(tensor_to_wire(tensor))
        assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
        assert bits(received) == bits(tensor)
    for shape in ((0,), (3, 0), (0, 5), (2, 0, 3)):
        received = tensor_from_wire(tensor_to_wire(torch.empty(shape, dtype=dtype)))
        assert (received.dtype, tuple(received.shape)) == (dtype, shape)


def test_strides_of_empty_and_one_element_tensors_do_not_matter():
    for tensor in (
        torch.from_numpy(np.arange(0)),
        torch.arange(6)[6:],
        torch.zeros(1).expand(1, 1),
        torch.arange(4).as_strided((1,), (0,)),
        torch.arange(8)[3:4].expand(1, 1, 1),
        torch.ones(3, 1).expand(3, 4),
        torch.arange(12).view(3, 4)[:, :0],
    ):
        received = tensor_from_wire(tensor_to_wire(tensor))
        assert torch.equal(received, tensor)


def test_contiguous_tensors_are_not_copied_on_either_side():
    tensor = torch.arange(20).view(5, 4)
    for part in (tensor, tensor[1:3]):
        wire = tensor_to_wire(part)
        assert wire[0].ctypes.data == part.data_ptr()
        assert wire[0].nbytes == part.nbytes
        assert tensor_from_wire(wire).data_ptr() == part.data_ptr()


def test_read_only_bytes_are_aliased_without_a_warning_and_kept_alive():
    data, dtype, shape = tensor_to_wire(torch.arange(4))
    frozen = np.frombuffer(data.tobytes(), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_from_wire((frozen, dtype, shape))
    assert tensor.data_ptr() == frozen.ctypes.data
    del frozen, data
    assert tensor.tolist() == [0, 1, 2, 3]


def test_gradients_stay_behind():
    assert not tensor_from_wire(tensor_to_wire(torch.zeros(2, requires_grad=True) * 2)).requires_grad
