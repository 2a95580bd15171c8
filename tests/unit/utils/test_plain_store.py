"""plain_store: whatever can be saved comes back the same, and no file can do more than hold data."""

import os
import pickle
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.nested import deep_equal, load_plain, object_array, save_plain, save_tensors

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from([np.int32(-3), np.float16(0.5), np.bool_(True), np.str_("é"), np.datetime64("2024-05-06")]),
)
arrays = st.sampled_from(
    [
        np.zeros((0, 3)),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array([1.5, np.nan]),
        np.array(["", "long text", "é"]),
        np.array([b"", b"ab"]),
        np.array([True, False])[::-1],
        np.array([1 + 2j]),
        np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        object_array([[1], "x", None, {"k": np.arange(3)}]),
        np.array([[None, 1], ["a", 2.0]], dtype=object),
    ]
)
tensors = st.sampled_from(
    [
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(3, 1).expand(3, 4),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
    ]
)
numbers = st.lists(st.integers(-(2**64), 2**64), min_size=16, max_size=20) | st.lists(
    st.floats(), min_size=16, max_size=20
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=3)))
values = st.recursive(
    scalars | arrays | tensors | numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=8,
)


def round_trip(value, folder: Path):
    save_plain(value, folder / "value.pt")
    return load_plain(folder / "value.pt")


def equal(a, b) -> bool:
    """As `same`, but types must agree all the way down, so that 1, 1.0, True and np.int64(1) are four values."""
    if isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn:
        return a.dtype == b.dtype and deep_equal(a.view(torch.uint8), b.view(torch.uint8))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return type(b) is dict and equal(list(a), list(b)) and equal(list(a.values()), list(b.values()))
    if isinstance(a, np.ndarray) and a.dtype == object:
        return isinstance(b, np.ndarray) and a.shape == b.shape and equal(list(a.flat), list(b.flat))
    return type(a) is type(b) and deep_equal(a, b)


@settings(max_examples=150)
@given(values)
def test_what_is_saved_comes_back_the_same(tmp_path_factory, value):
    assert equal(value, round_trip(value, tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("value", [b"", 2**3000, -(2**63), 2**63 - 1, "\ud800", [], (), {}, [1] * 15 + [True]])
def test_values_that_the_restricted_reader_does_not_know_by_itself(tmp_path, value):
    assert equal(round_trip(value, tmp_path), value)


def test_a_view_is_stored_without_the_storage_behind_it(tmp_path):
    big = torch.zeros(1_000_000)
    save_plain({"a": big[:10], "b": big.numpy()[5:7]}, tmp_path / "v.pt")
    assert (tmp_path / "v.pt").stat().st_size < 20_000


def test_loaded_arrays_and_tensors_may_be_written_and_the_file_keeps_its_content(tmp_path):
    save_plain({"t": torch.arange(4), "n": np.arange(4)}, tmp_path / "v.pt")
    loaded = load_plain(tmp_path / "v.pt")
    loaded["t"][0] = loaded["n"][0] = 99
    again = load_plain(tmp_path / "v.pt")
    assert again["t"].tolist() == again["n"].tolist() == [0, 1, 2, 3]


def test_dicts_and_tuples_of_other_classes_become_plain_ones(tmp_path):
    pair = namedtuple("Pair", "a b")(1, 2)
    assert equal(round_trip([pair, OrderedDict(x=1)], tmp_path), [(1, 2), {"x": 1}])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"^batch\['a'\]\[1\] .*builtins\.set"),
        ({"a": object_array([1, print])}, r"^batch\['a'\]\[1\] .*builtins\.builtin_function_or_method"),
        ({"a": np.zeros(2, dtype=[("x", "i4")])}, r"^batch\['a'\]: .*dtype \[\('x', '<i4'\)\]"),
        ({Path("x"): 1}, r"^batch key .*Path\('x'\) .*pathlib"),
        ({"d": torch.float32}, r"^batch\['d'\] .*torch\.dtype"),
    ],
)
def test_what_is_not_plain_data_is_refused_by_place(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        save_plain(value, tmp_path / "new" / "v.pt", what="batch")
    assert not (tmp_path / "new").exists()


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path):
    path = tmp_path / "v.pt"
    save_plain({"a": torch.arange(100), "b": object_array([["x"], {"y": 1}])}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"v\.pt: .*executed"):
            load_plain(path)


def test_tags_that_we_never_write_are_refused(tmp_path):
    path = tmp_path / "v.pt"
    nothing = torch.zeros(16, dtype=torch.uint8)
    for value in (("exec", "1"), ("array", "O", [2], 0, 16), ("array", "<i8", [3], 0, 16), ("tuple",), ()):
        torch.save({"format": "verl.plain/1", "value": value, "bytes": nothing}, path)
        with pytest.raises(ValueError, match=r"v\.pt: .*executed\. \((?!.*torch\.save)"):
            load_plain(path)


def test_a_pickle_inside_the_right_format_executes_nothing(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save(
        {"format": "verl.plain/1", "value": Bomb(), "bytes": torch.zeros(0, dtype=torch.uint8)}, tmp_path / "b.pt"
    )
    with pytest.raises(ValueError, match=r"b\.pt: .*\.mkdir\b.*executed"):
        load_plain(tmp_path / "b.pt")
    assert not (tmp_path / "executed").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "b.pt", weights_only=True)


def test_saved_files_have_the_permissions_of_any_new_file(tmp_path):
    save_plain(1, tmp_path / "saved.pt")
    (tmp_path / "other").write_text("x")
    assert (tmp_path / "saved.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_saved_tensors_are_a_plain_dict_for_torch_load_without_what_lies_behind_a_view(tmp_path):
    rows = torch.arange(1_000_000.0).reshape(1000, 1000)
    given = {
        "rows": rows[:2],
        "mask": torch.ones(2, dtype=torch.bool),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    save_tensors(given, tmp_path / "step.pt")
    loaded = torch.load(tmp_path / "step.pt", weights_only=True)
    assert type(loaded) is dict
    assert list(loaded) == list(given)
    assert all(deep_equal(loaded[name], given[name]) for name in given)
    assert (tmp_path / "step.pt").stat().st_size < 20_000
    assert [path.name for path in tmp_path.iterdir()] == ["step.pt"]
