"""DataProto: exact errors, what is a view and what a copy, borrowed memory, files that cannot execute."""

import copy
import os
import pickle
import re
import resource

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.protocol import (
    DataProto,
    DataProtoFuture,
    collate_fn,
    fold_batch_dim,
    mask_filler_rows,
    object_array,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def a_batch(rows: int = 6) -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(rows * 4).view(rows, 4), "score": torch.arange(rows, dtype=torch.float32)},
        {"uid": [f"u{i}" for i in range(rows)], "turns": [[i] * (i % 3) for i in range(rows)]},
        meta_info={"step": 1},
    )


def received(data: DataProto) -> tuple[DataProto, list[bytes]]:
    """The batch as it arrives from an object store, and the read-only buffers it lies in."""
    out_of_band: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=out_of_band.append)
    buffers = [bytes(buffer.raw()) for buffer in out_of_band]
    return pickle.loads(stream, buffers=buffers), buffers


def addresses(data: DataProto) -> dict[str, int]:
    """Where the tensors lie, without touching `batch` (which would copy borrowed ones)."""
    return {key: value.data_ptr() for key, value in data.tensors()}


# -------------------------------------------------------------------- exact errors


def refuses(parts: str, kind: type[Exception] = ValueError) -> pytest.RaisesExc[Exception]:
    """Expects an error whose message has these parts in this order; `…` stands for any text."""
    return pytest.raises(kind, match=".*".join(re.escape(part) for part in parts.split("…")))


def test_making_a_batch_names_the_key_and_the_sizes():
    with refuses("'b'…(3,)…'a'…(2,)"):
        DataProto.from_dict({"a": torch.zeros(2, 4), "b": torch.zeros(3, 4)})
    with refuses("'b'…(2, 5)…'a'…(2, 4)"):
        DataProto.from_dict({"a": torch.zeros(2, 4), "b": torch.zeros(2, 5)}, num_batch_dims=2)
    with refuses("'a'…()…1"):
        DataProto.from_dict({"a": torch.tensor(1)})
    with refuses("'a'…list…tensor"):
        DataProto.from_dict({"a": [1, 2]})
    with refuses("num_batch_dims…0"):
        DataProto.from_dict({"a": torch.zeros(2)}, num_batch_dims=0)
    with refuses("non_tensors…num_batch_dims=1"):
        DataProto.from_dict({"a": torch.zeros(2, 2)}, {"b": [1, 2]}, num_batch_dims=2)
    with refuses("non_tensor_batch['b']…3…batch…2"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1, 2, 3]})
    with refuses("non_tensor_batch['c']…3…non_tensor_batch['b']…2"):
        DataProto.from_dict(non_tensors={"b": [1, 2], "c": [1, 2, 3]})
    with refuses("from_single_dict: 'names'…list…torch.Tensor"):
        DataProto.from_single_dict({"a": torch.zeros(2), "names": ["x", "y"]})
    with refuses("non_tensor_batch['b']…list…numpy"):
        DataProto(non_tensor_batch={"b": [1, 2]})
    with refuses("batch_size of the TensorDict"):
        DataProto(TensorDict({"a": torch.zeros(2)}, batch_size=[]))
    with refuses("batch['inner']…TensorDict"):
        DataProto(TensorDict({"inner": TensorDict({"x": torch.zeros(2)}, batch_size=[2])}, batch_size=[2]))
    with refuses("(2, 3)…['b']"):
        DataProto(TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]), {"b": object_array([1, 2])})
    with refuses("from_tensordict: 'inner'…TensorDict"):
        inner = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
        DataProto.from_tensordict(TensorDict({"inner": inner}, batch_size=[2]))


def test_a_column_assigned_with_the_wrong_length_is_found_by_the_next_operation():
    other = a_batch()
    for operation in (
        lambda data: data[:2],
        lambda data: data.reorder([0]),
        lambda data: data.chunk(2),
        lambda data: DataProto.concat([other, data]),
        lambda data: data.union(other),
        lambda data: other.union(data),
        pickle.dumps,
        lambda data: data.save_to_disk("never-written"),
    ):
        data = a_batch()
        data.non_tensor_batch["late"] = object_array(range(4))
        with refuses("non_tensor_batch['late']…4…batch…6"):
            operation(data)


def test_unknown_keys_are_named_with_those_that_exist_and_nothing_changes():
    data = a_batch()
    for operation in (data.select, data.pop):
        with refuses("DataProto.batch: ['idz']…['ids', 'score']", KeyError):
            operation(["ids", "idz"])
        with refuses("DataProto.non_tensor_batch: ['x']…['turns', 'uid']", KeyError):
            operation(["ids"], ["x"])
        with refuses("DataProto.meta_info: ['lr']…['step']", KeyError):
            operation(["ids"], ["uid"], ["lr"])
    with refuses("DataProto.columns: ['x']…['ids', 'score', 'turns', 'uid']", KeyError):
        data.rename("x", "y")
    assert list(data.batch.keys()) == ["ids", "score"]
    assert list(data.non_tensor_batch) == ["uid", "turns"]
    assert data.meta_info == {"step": 1}


def test_rename_refuses_what_would_lose_a_column():
    data = a_batch()
    with refuses("rename: two…'uid'"):
        data.rename("ids", "uid")
    with refuses("rename: two…'x'"):
        data.rename(["ids", "uid"], ["x", "x"])
    with refuses("2 old…['ids', 'score']…1 new…['x']"):
        data.rename(["ids", "score"], ["x"])
    with refuses("2 old…['ids', 'ids']…2 new…['x', 'y']"):
        data.rename(["ids", "ids"], ["x", "y"])
    assert list(data.rename("ids", "input_ids").batch.keys()) == ["input_ids", "score"]


def test_union_refuses_every_kind_of_disagreement():
    def other(**changed) -> DataProto:
        return DataProto.from_single_dict(changed)

    data = a_batch(2)
    with refuses("union: 2…3"):
        data.union(a_batch(3))
    with refuses("'score'…row 1"):
        data.union(other(score=torch.tensor([0.0, 5.0])))
    with refuses("'score'…torch.float32 (2,)…torch.float64 (2,)"):
        data.union(other(score=torch.tensor([0.0, 1.0], dtype=torch.float64)))
    with refuses("'score'…torch.float32 (2,)…torch.float32 (2, 1)"):
        data.union(other(score=torch.tensor([[0.0], [1.0]])))
    with refuses("'uid'…row 1"):
        data.union(other(uid=object_array(["u0", "x"])))
    with refuses("'uid'…object (2,)…<U2 (2,)"):
        data.union(other(uid=np.array(["u0", "u1"])))
    with refuses("'turns'…row 1"):
        data.union(other(turns=object_array([[], [1, 2]])))
    with refuses("'uid'…tensor…object array"):
        data.union(other(uid=torch.zeros(2)))
    with refuses("'score'…tensor…object array"):
        data.union(other(score=object_array([0.0, 1.0])))
    with refuses("meta_info['step']…1…2"):
        data.union(DataProto(meta_info={"step": 2}))
    assert sorted(data.batch.keys()) == ["ids", "score"]
    assert data.union(other(score=torch.tensor([0.0, 1.0]))) is data


def test_union_functions_leave_their_inputs_alone():
    first, second = TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"b": torch.ones(2)}, [2])
    assert sorted(union_tensor_dict(first, second).keys()) == ["a", "b"]
    union_tensor_dict(first, None)["c"] = torch.zeros(2)
    union_tensor_dict(None, second)["c"] = torch.zeros(2)
    assert (list(first.keys()), list(second.keys())) == (["a"], ["b"])
    with refuses("union: …(2,)…(3,)"):
        union_tensor_dict(first, TensorDict({"b": torch.ones(3)}, [3]))
    one, two = {"a": np.arange(2)}, {"b": np.arange(2)}
    assert sorted(union_numpy_dict(one, two)) == ["a", "b"]
    assert (list(one), list(two)) == (["a"], ["b"])


def test_concat_names_the_part_and_the_column():
    data = a_batch()
    with refuses("concat: …empty"):
        DataProto.concat([])
    with refuses("0…1…tensor…['score']"):
        DataProto.concat([data, data.select(["ids"])])
    with refuses("0…2…non-tensor…['uid']"):
        DataProto.concat([data, data, data.select(None, ["turns"])])
    with refuses("'ids'…0…1: torch.int64 (2, 4)…torch.int64 (2, 3)"):
        DataProto.concat([DataProto.from_dict({"ids": torch.zeros(2, n, dtype=torch.int64)}) for n in (4, 3)])
    with refuses("'ids'…0…1: torch.int64 (2,)…torch.float32 (2,)"):
        DataProto.concat([DataProto.from_dict({"ids": torch.zeros(2, dtype=t)}) for t in (torch.int64, torch.float32)])
    with refuses("'x'…0…1: <U1 (1,)…int64 (1,)"):  # numpy would make "1" of the 1
        DataProto.concat([DataProto(non_tensor_batch={"x": np.array([v])}) for v in ("a", 1)])
    with refuses("'x'…0…1: float64 (1, 2)…float64 (1, 3)"):
        DataProto.concat([DataProto(non_tensor_batch={"x": np.zeros((1, n))}) for n in (2, 3)])
    with refuses("meta_info['step']…1…2"):
        DataProto.concat([DataProto.from_dict({"a": torch.zeros(1)}, meta_info={"step": n}) for n in (1, 2)])


def test_concat_takes_parts_without_tensors_and_numbers_of_several_types():
    names_only = DataProto.concat(
        [DataProto.from_dict(non_tensors={"x": ["a"]}), DataProto(non_tensor_batch={"x": np.arange(2)})]
    )
    assert names_only.non_tensor_batch["x"].tolist() == ["a", 0, 1]
    mixed = DataProto.concat([DataProto(non_tensor_batch={"x": np.array([v])}) for v in (1, 0.5)])
    assert mixed.non_tensor_batch["x"].tolist() == [1.0, 0.5]
    emptied = a_batch(2)
    emptied.pop(["ids", "score"])
    assert len(DataProto.concat([emptied, emptied])) == 4


def test_rows_outside_or_of_the_wrong_kind_are_index_errors():
    data = a_batch()
    with refuses("row 6…6 rows", IndexError):
        data[6]
    with refuses("row -7…6 rows", IndexError):
        data[[0, -7]]
    with refuses("mask…(5,)…6 rows", IndexError):
        data[np.ones(5, dtype=bool)]
    with refuses("float64 (1,)", IndexError):
        data.select_idxs([0.5])
    with refuses("int64 (1, 1)", IndexError):
        data.reorder([[1]])
    with refuses("<U3 (1,)", IndexError):
        data[["ids"]]


def test_sizes_that_make_no_sense_are_refused():
    data = a_batch()
    for call, message in (
        (lambda: data.split(0), "split: split_size…0"),
        (lambda: data.chunk(0), "chunk: chunks…0"),
        (lambda: data.chunk(4), "chunk: 6 rows…4 chunks"),
        (lambda: data.repeat(0), "repeat: repeat_times…0"),
        (lambda: data.sample_level_repeat([1, 2]), "6 rows…6 counts…(2,)"),
        (lambda: data.sample_level_repeat([1] * 5 + [-2]), "counts…int64, minimum -2"),
        (lambda: data.sample_level_repeat([0.5] * 6), "counts…float64, minimum 0.5"),
        (lambda: data.padding(1, "middle"), "candidate 'middle'"),
        (lambda: data.padding(-1), "padding: …-1 copies…6 rows"),
        (lambda: data[:0].padding(2), "padding: …2 copies…0 rows"),
        (lambda: data.make_iterator(0, 1), "mini_batch_size…0"),
        (lambda: data.make_iterator(4, 1), "make_iterator: 6 rows…4"),
        (lambda: data.make_iterator(2, 1, dataloader_kwargs={"workers": 2}), "dataloader_kwargs ['workers']"),
        (lambda: pad_dataproto_to_divisor(data, 0), "size_divisor…0"),
        (lambda: unpad_dataproto(data, 7), "pad_size…7"),
        (lambda: fold_batch_dim(data, 4), "fold_batch_dim: 6 rows…4 rows"),
        (lambda: unfold_batch_dim(data.select(["ids", "score"], [])), "unfold_batch_dim: 'score'…(6,)…'ids'…(6, 4)"),
        (lambda: collate_fn([]), "collate_fn: items"),
        (lambda: collate_fn([data[0], data.select(["ids"])[0]]), "0…1…tensor…['score']"),
    ):
        with refuses(message):
            call()


# -------------------------------------------------------------------- making and looking


def test_a_tensordict_gives_tensors_and_object_arrays():
    source = TensorDict(
        {
            "a": torch.zeros(3, 2),
            "each": NonTensorStack("x", "y", "z"),
            "all": NonTensorData("q", batch_size=[3]),
        },
        batch_size=[3],
    )
    data = DataProto.from_tensordict(source, {"k": 1})
    assert list(data.batch.keys()) == ["a"]
    assert data.non_tensor_batch["each"].tolist() == ["x", "y", "z"]
    assert data.non_tensor_batch["all"].tolist() == ["q", "q", "q"]
    assert data.meta_info == {"k": 1}


def test_lists_of_equal_length_stay_one_object_per_row():
    data = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["pairs"].shape == (2,)
    assert data[1].non_tensor_batch["pairs"] == [3, 4]


def test_data_info_names_every_column():
    info = a_batch().get_data_info()
    assert info.splitlines() == [
        "DataProto of 6 rows",
        "  ids: int64 (6, 4) on cpu",
        "  score: float32 (6,) on cpu",
        "  uid: array of str (6,)",
        "  turns: array of list (6,)",
        "  meta_info: ['step']",
    ]


def test_several_batch_dimensions_survive_row_operations():
    data = DataProto.from_dict({"a": torch.arange(24).view(4, 3, 2)}, num_batch_dims=2)
    for taken in (
        data[1:3],
        data[[1, 2]],
        DataProto.concat([data[1:2], data[2:3]]),
        pickle.loads(pickle.dumps(data[1:3])),
    ):
        assert tuple(taken.batch.batch_size) == (2, 3)
        assert torch.equal(taken.batch["a"], data.batch["a"][1:3])


def test_fillers_weigh_nothing_and_leave_the_source_alone():
    data = DataProto.from_dict({"response_mask": torch.ones(4, 3), "ids": torch.ones(4, 3)})
    filled = mask_filler_rows(data, 1)
    assert filled.batch["response_mask"].sum(1).tolist() == [3, 3, 3, 0]
    assert data.batch["response_mask"].sum() == 12
    assert filled.batch["ids"].data_ptr() == data.batch["ids"].data_ptr()
    assert mask_filler_rows(data, 0) is data


def test_a_future_waits_once_and_passes_the_error_on():
    calls = []
    future = DataProtoFuture(lambda: calls.append(1) or a_batch())
    halves = future.chunk(2)
    assert len(DataProtoFuture.concat(halves).get()) == 6
    assert halves[1].get().non_tensor_batch["uid"].tolist() == ["u3", "u4", "u5"]
    assert calls == [1]

    def failing() -> DataProto:
        raise ValueError("rank 1 failed")

    with refuses("rank 1 failed"):
        DataProtoFuture.concat([future, DataProtoFuture(failing)]).get()


# -------------------------------------------------------------------- views and copies


def test_slices_chunks_splits_and_selections_share_memory():
    data = a_batch()
    base, stride = data.batch["ids"].data_ptr(), data.batch["ids"].stride(0) * 8
    assert addresses(data[2:5])["ids"] == base + 2 * stride
    assert addresses(data[1::2])["ids"] == base + stride
    assert [addresses(part)["ids"] for part in data.chunk(2)] == [base, base + 3 * stride]
    assert [addresses(part)["ids"] for part in data.split(4)] == [base, base + 4 * stride]
    assert addresses(data.select(["ids"])) == {"ids": base}
    assert addresses(data.select())["ids"] == addresses(copy.copy(data))["ids"] == base
    assert addresses(unpad_dataproto(data, 2))["ids"] == base
    assert [addresses(part)["ids"] for part in data.make_iterator(3, 1)] == [base, base + 3 * stride]
    assert addresses(fold_batch_dim(data, 3))["ids"] == base
    assert data[0].batch["ids"].data_ptr() == base
    for copied in (data[[0, 1]], data.repeat(1), data.select(deepcopy=True), copy.deepcopy(data)):
        assert addresses(copied)["ids"] != base


def test_columns_added_to_a_selection_do_not_appear_in_the_source():
    data = a_batch()
    for part in (data.select(), copy.copy(data), data[:], DataProto().union(data)):
        part.batch["new"] = torch.zeros(6)
        part.non_tensor_batch["new_object"] = object_array(range(6))
        part.meta_info["new_meta"] = 1
    assert sorted(data.batch.keys()) == ["ids", "score"]
    assert sorted(data.non_tensor_batch) == ["turns", "uid"]
    assert data.meta_info == {"step": 1}


def test_a_sliced_batch_pickles_only_its_rows():
    data = DataProto.from_dict({"a": torch.zeros(1000, 100)})
    assert len(pickle.dumps(data[:10], protocol=5)) < 10 * 100 * 4 + 1000


def test_tensors_travel_out_of_band_without_a_copy():
    data = a_batch()
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    sent = {np.frombuffer(buffer.raw(), dtype=np.uint8).ctypes.data for buffer in buffers}
    assert sent == set(addresses(data).values())
    assert addresses(pickle.loads(stream, buffers=buffers)) == addresses(data)


# -------------------------------------------------------------------- borrowed memory


def write_everywhere(data: DataProto) -> None:
    data.batch["ids"].fill_(-1)
    data.batch["score"][0] = -1


@pytest.mark.parametrize(
    "derive",
    [
        lambda data: data,
        lambda data: data[1:4],
        lambda data: data[::2],
        lambda data: data.chunk(3)[1],
        lambda data: data.select(["ids", "score"]),
        lambda data: data.pop(["ids", "score"]),
        lambda data: data.rename("ids", "x").rename("x", "ids"),
        lambda data: data.to("cpu"),
        lambda data: copy.copy(data),
        lambda data: copy.deepcopy(data),
        lambda data: DataProto(meta_info={"a": 1}).union(data),
        lambda data: DataProto.from_dict({"more": torch.zeros(6)}).union(data),
        lambda data: data.union(DataProto.from_dict({"more": torch.zeros(6)})),
        lambda data: DataProto.concat([data, data]),
        lambda data: next(data.make_iterator(2, 1)),
        lambda data: data[[0, 2]],
        lambda data: mask_filler_rows(data, 1),
        lambda data: fold_batch_dim(data, 2),
        lambda data: pickle.loads(pickle.dumps(data, protocol=5)),
    ],
)
def test_writing_to_a_received_batch_or_what_came_from_it_leaves_the_buffers_alone(derive):
    source = DataProto.from_dict(
        {"ids": torch.arange(24).view(6, 4), "score": torch.arange(6.0), "response_mask": torch.ones(6, 2)}
    )
    data, buffers = received(source)
    before = [bytes(bytearray(buffer)) for buffer in buffers]
    derived = derive(data)
    write_everywhere(derived)
    assert (derived.batch["ids"] == -1).all()
    assert buffers == before


def test_writing_through_an_item_or_a_resent_batch_leaves_the_buffers_alone():
    data, buffers = received(a_batch())
    before = [bytes(bytearray(buffer)) for buffer in buffers]
    data[3].batch["ids"].fill_(-1)
    again: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=again.append)
    resent = pickle.loads(stream, buffers=again)
    assert addresses(resent) == addresses(data)
    write_everywhere(resent)
    assert buffers == before


def test_a_received_batch_is_copied_only_when_touched():
    data, buffers = received(a_batch())
    lies_at = {np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers}
    assert set(addresses(data).values()) == lies_at
    assert set(addresses(data.select(["ids"])).values()) < lies_at
    assert set(addresses(data[:3]).values()) == lies_at
    assert set(addresses(data.to("cpu")).values()) == lies_at
    part = data[:3]
    part.batch["ids"].fill_(-1)
    assert not set(addresses(part).values()) & lies_at
    assert set(addresses(data).values()) == lies_at
    assert data.batch["ids"].tolist() == a_batch().batch["ids"].tolist()
    assert not set(addresses(data).values()) & lies_at
    copied = addresses(data)
    data.batch["ids"].add_(1)
    assert addresses(data) == copied


def test_received_arrays_of_numbers_are_writable():
    data, _ = received(DataProto(non_tensor_batch={"n": np.arange(5)}))
    data.non_tensor_batch["n"][0] = 9
    assert data.non_tensor_batch["n"].tolist() == [9, 1, 2, 3, 4]


# -------------------------------------------------------------------- files


class Exploding:
    """Pickled, it creates the file `trace` when it is loaded."""

    trace = ""

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize("write", [lambda value, path: pickle.dump(value, path.open("wb")), torch.save])
def test_a_file_that_would_execute_code_is_refused_and_executes_nothing(tmp_path, write):
    Exploding.trace = str(tmp_path / "executed")
    bomb = tmp_path / "bomb.pt"
    write({"format": "verl.DataProto/1", "tensors": Exploding()}, bomb)
    with pytest.raises(ValueError, match=r"bomb\.pt"):
        DataProto.load_from_disk(bomb)
    assert not (tmp_path / "executed").exists()
    torch.load(bomb, weights_only=False) if write is torch.save else pickle.load(bomb.open("rb"))
    assert (tmp_path / "executed").exists(), "the bomb itself must work, or the test proves nothing"


def test_objects_of_unknown_classes_are_refused_with_key_and_row_and_nothing_is_written(tmp_path):
    data = a_batch()
    data.non_tensor_batch["tool"] = object_array([1, 2, {"call": [Exploding()]}, 4, 5, 6])
    with refuses("DataProto['non_tensor_batch']['tool'][2]['call'][0]…Exploding", TypeError):
        data.save_to_disk(tmp_path / "batch.pt")
    data.non_tensor_batch.pop("tool")
    data.meta_info["when"] = {3, 4}
    with refuses("DataProto['meta_info']['when']…builtins.set", TypeError):
        data.save_to_disk(tmp_path / "batch.pt")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "batch.pt"
    a_batch().save_to_disk(path)
    old = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) + 1000, hard))  # the disk is full from here on
    try:
        with pytest.raises((OSError, RuntimeError)):
            DataProto.from_dict({"ids": torch.zeros(100_000)}).save_to_disk(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    assert len(DataProto.load_from_disk(path)) == 6


def test_files_that_are_no_batches_are_named(tmp_path):
    path = tmp_path / "x.pt"
    for write in (
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"not a batch"),
        lambda: torch.save({"a": torch.zeros(2)}, path),
        lambda: (a_batch(500).save_to_disk(path), path.write_bytes(path.read_bytes()[:-300])),
    ):
        write()
        with pytest.raises(ValueError, match=r"x\.pt"):
            DataProto.load_from_disk(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "missing.pt")


def test_parameters_have_both_of_the_names_that_users_write(tmp_path):
    data, path = a_batch(), tmp_path / "x.pt"
    for name in ("path", "filepath"):
        data.save_to_disk(**{name: path})
        assert len(DataProto.load_from_disk(**{name: path})) == 6
    for name in ("times", "repeat_times"):
        assert len(data.sample_level_repeat(**{name: [2] * 6})) == 12
    for size, candidate in (("size", "candidate"), ("padding_size", "padding_candidate")):
        assert len(a_batch().padding(**{size: 2, candidate: "first"})) == 8
    with pytest.raises(TypeError, match="filepath"):
        data.save_to_disk(path=path, filepath=path)
