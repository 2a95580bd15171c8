"""Laws of DataProto on random batches: every operation is compared with the same operation on plain lists of rows.

`content` turns a batch into {column: [row, …]} with rows as exact, comparable values (dtype, shape and bytes), so that
NaN, bfloat16, bool, zero-width and ragged columns all compare bit for bit.
"""

import copy
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from verl.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    object_array,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

DTYPES = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
ROW_SHAPES = ((), (1,), (5,), (0,), (3, 2), (2, 0))
ARRAY_KINDS = ("ragged", "dicts", "strings", "ints", "floats", "arrays")

law = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def random_tensor(rng: np.random.Generator, rows: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.from_numpy(rng.integers(0, 200, (rows, *row_shape))).to(dtype)
    if dtype.is_floating_point:
        values = values / 7
        values[torch.from_numpy(rng.random(values.shape) < 0.2)] = float("nan")
    return values


def random_array(rng: np.random.Generator, rows: int, kind: str) -> np.ndarray:
    if kind == "ragged":
        return object_array([rng.integers(0, 9, rng.integers(0, 5)).tolist() for _ in range(rows)])
    if kind == "dicts":
        return object_array([{"answer": str(i), "score": float(rng.random()), "none": None} for i in range(rows)])
    if kind == "strings":
        return np.array(["x" * int(n) for n in rng.integers(0, 6, rows)], dtype="<U6")
    if kind == "ints":
        return rng.integers(-5, 5, rows)
    if kind == "floats":
        return np.where(rng.random((rows, 3)) < 0.3, np.nan, rng.random((rows, 3)))
    return object_array([rng.random(rng.integers(0, 4)) for _ in range(rows)])


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 9) -> DataProto:
    rows = draw(st.integers(min_rows, max_rows))
    columns = draw(st.lists(st.tuples(st.sampled_from(ROW_SHAPES), st.sampled_from(DTYPES)), max_size=4))
    kinds = draw(st.lists(st.sampled_from(ARRAY_KINDS), min_size=0 if columns else 1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tensors = {f"t{i}": random_tensor(rng, rows, shape, dtype) for i, (shape, dtype) in enumerate(columns)}
    arrays = {f"n{i}": random_array(rng, rows, kind) for i, kind in enumerate(kinds)}
    return DataProto.from_dict(tensors, arrays, meta_info={"step": 3, "temperature": float("nan")})


def content(data: DataProto) -> dict[str, list]:
    columns = {}
    for key, value in data.batch.items() if data.batch is not None else ():
        # Rows one by one as [1, …], since a 0-d tensor has no byte view.
        rows = [value[i : i + 1].clone(memory_format=torch.contiguous_format) for i in range(len(value))]
        columns[key] = [(value.dtype, row.shape[1:], row.view(torch.uint8).numpy().tobytes()) for row in rows]
    for key, array in data.non_tensor_batch.items():
        if array.dtype == object:
            columns[key] = [("object", repr(cell)) for cell in array]
        else:
            columns[key] = [(array.dtype.str, array.shape[1:], array[i : i + 1].tobytes()) for i in range(len(array))]
    assert all(len(rows) == len(data) for rows in columns.values())
    return columns


def rows_at(columns: dict[str, list], index) -> dict[str, list]:
    return {key: [rows[i] for i in index] for key, rows in columns.items()}


def assert_equal(a: DataProto, b: DataProto) -> None:
    assert content(a) == content(b)
    assert repr(a.meta_info) == repr(b.meta_info)
    assert (a.batch is None) == (b.batch is None)


def over_the_wire(data: DataProto) -> DataProto:
    """Pickled out-of-band, received in read-only buffers, as from an object store."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])


# -------------------------------------------------------------------- parts and wholes


@law
@given(batches(), st.integers(1, 12))
def test_concat_of_split_is_the_whole(data, size):
    parts = data.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert_equal(DataProto.concat(parts), data)


@law
@given(batches(), st.integers(1, 9))
def test_concat_of_chunks_is_the_whole(data, chunks):
    if len(data) % chunks:
        with pytest.raises(ValueError, match=rf"^DataProto\.chunk: {len(data)} rows .*\b{chunks} chunks"):
            data.chunk(chunks)
        data.meta_info["_verl_auto_padding"] = True
    parts = data.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    assert_equal(DataProto.concat(parts), data)


@law
@given(batches(min_rows=1), st.integers(1, 30))
def test_unpad_of_pad_is_the_whole_for_every_divisor(data, divisor):
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert content(padded) == rows_at(content(data), [i % len(data) for i in range(len(padded))])
    assert_equal(unpad_dataproto(padded, pad_size), data)


@law
@given(batches(), st.integers(1, 9))
def test_unfold_of_fold_is_the_whole(data, outer):
    assume(len(data) % outer == 0)
    folded = fold_batch_dim(data, outer)
    assert len(folded) == outer
    assert_equal(unfold_batch_dim(folded), data)


@law
@given(batches(min_rows=1))
def test_collated_items_are_the_batch(data):
    whole = collate_fn([data[i] for i in range(len(data))])
    for key, value in data.batch.items() if data.batch is not None else ():
        assert torch.equal(whole.batch[key].nan_to_num(7), value.nan_to_num(7))
    for key, array in data.non_tensor_batch.items():
        assert [repr(cell) for cell in whole.non_tensor_batch[key]] == [repr(cell) for cell in array]


# -------------------------------------------------------------------- rows


@law
@given(batches(), st.data())
def test_reorder_permutes_every_field_and_its_inverse_restores(data, draw):
    order = np.array(draw.draw(st.permutations(range(len(data)))), dtype=np.int64)
    before, original = content(data), copy.deepcopy(data)
    data.reorder(order if len(order) % 2 else torch.from_numpy(order))
    assert content(data) == rows_at(before, order)
    data.reorder(np.argsort(order))
    assert_equal(data, original)


@law
@given(batches(), st.integers(1, 4), st.booleans())
def test_repeat_is_numpy_repeat_or_tile(data, times, interleave):
    rows = np.arange(len(data))
    expected = np.repeat(rows, times) if interleave else np.tile(rows, times)
    assert content(data.repeat(times, interleave)) == rows_at(content(data), expected)


@law
@given(batches(), st.data())
def test_sample_level_repeat_is_numpy_repeat(data, draw):
    times = draw.draw(st.lists(st.integers(0, 3), min_size=len(data), max_size=len(data)))
    expected = rows_at(content(data), np.repeat(np.arange(len(data)), np.array(times, dtype=np.int64)))
    for form in (times, np.array(times, dtype=np.int64), torch.tensor(times, dtype=torch.int64)):
        assert content(data.sample_level_repeat(form)) == expected


@law
@given(batches(), st.slices(9))
def test_slices_are_list_slices_negative_steps_included(data, rows):
    expected = rows_at(content(data), range(len(data))[rows])
    assert content(data[rows]) == expected
    assert content(data.slice(rows.start, rows.stop, rows.step)) == expected


@law
@given(batches(), st.data())
def test_masks_and_indices_pick_the_same_rows_of_every_column(data, draw):
    mask = draw.draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data)))
    kept = rows_at(content(data), np.flatnonzero(mask))
    for form in (np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool), mask):
        assert content(data[form]) == kept
    bounds = st.integers(-len(data), len(data) - 1) if len(data) else st.nothing()
    index = draw.draw(st.lists(bounds, max_size=12) if len(data) else st.just([]))
    for form in (index, np.array(index, dtype=np.int32), torch.tensor(index, dtype=torch.int64)):
        assert content(data.select_idxs(form)) == rows_at(content(data), index)


@law
@given(batches(min_rows=1), st.data())
def test_an_int_gives_that_row_of_every_column(data, draw):
    row = draw.draw(st.integers(-len(data), len(data) - 1))
    item, alone = data[row], data[[row]]
    for key, value in data.batch.items() if data.batch is not None else ():
        assert item.batch[key].shape == value.shape[1:]
        assert torch.equal(item.batch[key].nan_to_num(7), alone.batch[key][0].nan_to_num(7))
    assert {key: repr(cell) for key, cell in item.non_tensor_batch.items()} == {
        key: repr(array[row]) for key, array in data.non_tensor_batch.items()
    }
    assert item.meta_info == data.meta_info


@law
@given(batches(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.booleans())
def test_every_epoch_covers_every_row_once_and_a_seed_repeats_the_order(data, size, epochs, seed, shuffle):
    data.non_tensor_batch["id"] = np.arange(len(data))

    def order(seed: int) -> list[list[int]]:
        kwargs = {"shuffle": shuffle, "drop_last": False}
        batches = data.make_iterator(size, epochs, seed, dataloader_kwargs=kwargs)
        ids = []
        for batch in batches:
            assert len(batch) <= size
            assert content(batch) == rows_at(content(data), batch.non_tensor_batch["id"])
            ids.extend(batch.non_tensor_batch["id"].tolist())
        return [ids[i * len(data) : (i + 1) * len(data)] for i in range(epochs)]

    passes = order(seed)
    assert all(sorted(ids) == list(range(len(data))) for ids in passes)
    assert passes == order(seed)
    if not shuffle:
        assert all(ids == list(range(len(data))) for ids in passes)


# -------------------------------------------------------------------- columns


@law
@given(batches(), st.data())
def test_selected_columns_and_the_rest_unite_to_the_whole(data, draw):
    tensor_keys = list(data.batch.keys()) if data.batch is not None else []
    some = draw.draw(st.sets(st.sampled_from(tensor_keys))) if tensor_keys else set()
    others = draw.draw(st.sets(st.sampled_from(sorted(data.non_tensor_batch)))) if data.non_tensor_batch else set()
    chosen = data.select(sorted(some), sorted(others), ["step"])
    rest = data.select(
        [key for key in tensor_keys if key not in some],
        [key for key in data.non_tensor_batch if key not in others],
        ["temperature"],
    )
    assert set(content(chosen)) == some | others
    whole = chosen.union(rest)
    assert content(whole) == content(data)
    assert whole.meta_info.keys() == data.meta_info.keys()


@law
@given(batches(), st.data())
def test_union_puts_back_what_pop_took(data, draw):
    original = copy.deepcopy(data)
    tensor_keys = list(data.batch.keys()) if data.batch is not None else []
    some = draw.draw(st.lists(st.sampled_from(tensor_keys), unique=True)) if tensor_keys else []
    others = draw.draw(st.lists(st.sampled_from(sorted(data.non_tensor_batch)))) if data.non_tensor_batch else []
    popped = data.pop(some, others, ["step"])
    assert set(content(popped)) == {*some, *others}
    assert not set(content(data)) & {*some, *others}
    assert "step" not in data.meta_info
    data.union(popped)
    assert content(data) == content(original)
    assert data.meta_info.keys() == original.meta_info.keys()


@law
@given(batches(), st.data())
def test_rename_there_and_back_is_nothing_and_names_may_be_exchanged(data, draw):
    original = copy.deepcopy(data)
    names = list(content(data))
    old = draw.draw(st.permutations(names))
    new = [f"new_{name}" for name in old]
    assert set(content(data.rename(old, new))) == set(new)
    assert_equal(data.rename(new, old), original)
    tensors = list(data.batch.keys()) if data.batch is not None else []
    if len(tensors) > 1:
        data.rename(tensors[:2], tensors[1::-1])
        assert content(data)[tensors[0]] == content(original)[tensors[1]]
        assert content(data)[tensors[1]] == content(original)[tensors[0]]


@law
@given(batches(min_rows=1), st.data())
def test_union_with_itself_is_nothing_and_any_changed_cell_is_refused(data, draw):
    same = copy.deepcopy(data)
    data.union(same)
    assert_equal(data, same)
    filled = [key for key, value in data.batch.items() if value.numel()] if data.batch is not None else []
    assume(filled)
    key = draw.draw(st.sampled_from(filled))
    flat = same.batch[key].view(-1)
    at = draw.draw(st.integers(0, len(flat) - 1))
    flat[at] = ~flat[at] if flat.dtype == torch.bool else (1 if flat[at] != 1 else 0)
    before = content(data)
    with pytest.raises(ValueError, match=rf"^union: '{key}' .*row \d"):
        data.union(same)
    assert content(data) == before


# -------------------------------------------------------------------- copies, wire, disk


@law
@given(batches())
def test_pickle_and_deepcopy_give_the_same_batch(data):
    for protocol in (2, 4, 5):
        assert_equal(pickle.loads(pickle.dumps(data, protocol=protocol)), data)
    received = over_the_wire(data)
    assert_equal(over_the_wire(received), data)  # a received batch, sent on before anything touches it
    assert_equal(received, data)
    assert_equal(copy.deepcopy(data), data)
    assert_equal(copy.copy(data), data)


@settings(max_examples=25)
@given(batches(), st.integers(0, 3))
def test_save_and_load_give_the_same_batch(data, start):
    view = data[start:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "batch.pt"
        view.save_to_disk(path)
        loaded = DataProto.load_from_disk(path)
        assert_equal(loaded, view)
        for value in loaded.batch.values() if loaded.batch is not None else ():
            value.zero_()  # memory of ours: the file does not change
        assert_equal(DataProto.load_from_disk(path), view)


# -------------------------------------------------------------------- programs


def with_row_ids(rows: int, rng: np.random.Generator) -> DataProto:
    """A batch whose every column carries the row's id in its own form."""
    ids = np.arange(rows)
    return DataProto.from_dict(
        {
            "vector": torch.from_numpy(ids),
            "matrix": torch.from_numpy(ids)[:, None].repeat(1, 4).to(torch.bfloat16),
            "cube": torch.from_numpy(ids)[:, None, None].expand(rows, 2, 3).to(torch.float32),
            "mask": torch.from_numpy(rng.random((rows, 3)) < 0.5),
            "nothing": torch.empty(rows, 0),
        },
        {
            "ragged": object_array([[int(i)] * int(rng.integers(1, 4)) for i in ids]),
            "dict": object_array([{"id": int(i)} for i in ids]),
            "number": ids.copy(),
            "text": np.array([str(i) for i in ids], dtype="<U3"),
        },
    )


def ids_of(data: DataProto) -> list[int]:
    """The rows' ids, which all columns must agree on."""
    ids = data.batch["vector"].tolist()
    assert data.batch["matrix"].tolist() == [[i] * 4 for i in ids]
    assert data.batch["cube"].tolist() == [[[i] * 3] * 2 for i in ids]
    assert data.batch["nothing"].shape == (len(ids), 0)
    assert [set(cell) for cell in data.non_tensor_batch["ragged"]] == [{i} for i in ids]
    assert [cell["id"] for cell in data.non_tensor_batch["dict"]] == ids
    assert data.non_tensor_batch["number"].tolist() == ids
    assert [int(text) for text in data.non_tensor_batch["text"]] == ids
    return ids


def step(data: DataProto, ids: list[int], operation: str, draw: st.DataObject) -> tuple[DataProto, list[int]]:
    """One operation on the batch and on the plain list of ids."""
    n = len(ids)
    number = draw.draw(st.integers(1, 4))
    if operation == "slice":
        rows = draw.draw(st.slices(n))
        return data[rows], ids[rows]
    if operation == "mask":
        mask = draw.draw(st.lists(st.sampled_from([True, True, False]), min_size=n, max_size=n))
        return data[np.array(mask, dtype=bool)], [i for i, keep in zip(ids, mask, strict=True) if keep]
    if operation == "index":
        index = draw.draw(st.lists(st.integers(-n, n - 1), max_size=8)) if n else []
        return data.select_idxs(index), [ids[i] for i in index]
    if operation == "reorder":
        order = draw.draw(st.permutations(range(n)))
        data.reorder(order)
        return data, [ids[i] for i in order]
    if operation == "repeat":
        return data.repeat(number), [i for i in ids for _ in range(number)]
    if operation == "tile":
        return data.repeat(number, interleave=False), ids * number
    if operation == "sample_level_repeat":
        times = draw.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
        return data.sample_level_repeat(times), [i for i, k in zip(ids, times, strict=True) for _ in range(k)]
    if operation == "split":
        parts = [ids[i : i + number] for i in range(0, n, number)] or [[]]
        return DataProto.concat(data.split(number)[::-1]), [i for part in parts[::-1] for i in part]
    if operation == "padding":
        return (data.padding(number, "first"), ids + ids[:1] * number) if n else (data, ids)
    if operation == "pad":
        return (pad_dataproto_to_divisor(data, 4)[0], [ids[i % n] for i in range(-(-n // 4) * 4)]) if n else (data, ids)
    if operation == "pop":
        return data.union(data.pop(["matrix", "nothing"], ["dict"])), ids
    if operation == "rename":
        return data.rename(["vector", "text"], ["v", "t"]).rename(["v", "t"], ["vector", "text"]), ids
    if operation == "wire":
        return over_the_wire(data), ids
    if operation == "fold":
        return unfold_batch_dim(fold_batch_dim(data, n)) if n else data, ids
    assert operation == "deepcopy"
    return data.select(deepcopy=True), ids


OPERATIONS = (
    *("slice", "mask", "index", "reorder", "repeat", "tile", "sample_level_repeat", "split", "padding", "pad"),
    *("pop", "rename", "wire", "fold", "deepcopy"),
)


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.integers(0, 8), st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=8), st.data())
def test_every_column_follows_the_rows_through_any_program_of_operations(rows, program, draw):
    data = with_row_ids(rows, np.random.default_rng(rows))
    masks = data.batch["mask"].tolist()
    ids = list(range(rows))
    for operation in program:
        data, ids = step(data[:16], ids[:16], operation, draw)
        data.check_consistency()
        assert len(data) == len(ids)
    assert ids_of(data) == ids
    assert data.batch["mask"].tolist() == [masks[i] for i in ids]
