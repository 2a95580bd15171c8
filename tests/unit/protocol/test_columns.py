"""Aliases of columns, batches of prompts joined with their answers, and splits into a number of parts."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl.protocol import DataProto, collate_fn, object_array
from verl.single_controller.ray import BatchRef
from verl.types.schema import ALIASES, COLUMNS, OBJECT, RESERVED


def column(name: str, rows: int = 3) -> torch.Tensor | np.ndarray:
    if COLUMNS[name].axis == OBJECT:
        return object_array([{"ground_truth": str(row), "style": "rule"} for row in range(rows)])
    return torch.rand(rows, 4)


def plain(columns: dict) -> DataProto:
    return DataProto.from_single_dict(columns)


def reference(columns: dict) -> BatchRef:
    """Columns that are set on the controller stay there: no store is needed."""
    batch = BatchRef({}, 0, {})
    for name, values in columns.items():
        (batch.batch if isinstance(values, torch.Tensor) else batch.non_tensor_batch)[name] = values
    return batch


@pytest.mark.parametrize("make", [plain, reference])
@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_reads_the_first_of_its_columns_that_the_batch_has(make, name):
    alias = ALIASES[name]
    columns = {source: column(source) for source in alias.columns}
    while columns:
        batch, (source, values) = make({"responses": torch.zeros(3, 4), **columns}), next(iter(columns.items()))
        kind = batch.batch if isinstance(values, torch.Tensor) else batch.non_tensor_batch
        expected = values.tolist() if alias.entry is None else [row[alias.entry] for row in values]
        assert [found.tolist() for found in (batch[name], kind[name], kind.get(name))] == [expected] * 3
        assert name not in batch.batch.keys()
        assert name not in batch.non_tensor_batch.keys(), "an alias is not a column"
        del columns[source]
    empty = make({"responses": torch.zeros(3, 4), "index": object_array([1, 2, 3])})
    for kind in (empty, empty.batch, empty.non_tensor_batch):
        with pytest.raises(KeyError, match=name):
            kind[name]
    assert empty.batch.get(name, None) is None
    assert empty.non_tensor_batch.get(name) is None


@pytest.mark.parametrize("make", [plain, reference])
def test_a_column_with_the_name_of_an_alias_is_read_itself(make):
    batch = make({"rollout_log_probs": torch.zeros(3, 4), "reward_model": column("reward_model")})
    assert batch.batch["old_log_probs"].sum() == 0
    batch.batch["old_log_probs"] = torch.ones(3, 4)
    batch.non_tensor_batch["ground_truth"] = object_array(["a", "b", "c"])
    assert batch.batch["old_log_probs"].sum() == 12
    assert batch.batch["rollout_log_probs"].sum() == 0
    assert batch["ground_truth"].tolist() == ["a", "b", "c"]


def test_writing_through_an_alias_leaves_the_stored_column_unchanged():
    data = DataProto.from_dict({"rollout_log_probs": torch.zeros(2, 3)})
    data.batch["old_log_probs"] += 1
    assert data.batch["old_log_probs"].tolist() == [[1.0] * 3] * 2
    assert data.batch["rollout_log_probs"].tolist() == [[0.0] * 3] * 2


def test_an_alias_cannot_be_popped():
    data = DataProto.from_dict({"rollout_log_probs": torch.zeros(2, 3)})
    with pytest.raises(KeyError, match="rollout_log_probs"):
        data.pop(batch_keys=["old_log_probs"])
    assert list(data.batch.keys()) == ["rollout_log_probs"]


def test_aliases_are_no_names_that_data_may_not_have():
    assert RESERVED.isdisjoint({"rewards", "ref_log_probs", "ground_truth"})
    assert all(source in COLUMNS for alias in ALIASES.values() for source in alias.columns)


def test_aliases_survive_every_way_to_another_batch(tmp_path):
    batch = plain({"ref_log_prob": torch.arange(12.0).view(3, 4), "reward_model": column("reward_model")})
    batch.save_to_disk(tmp_path / "batch")
    others = [
        batch[:],
        batch.select_idxs([0, 1, 2]),
        batch.select(["ref_log_probs"], ["ground_truth"]),
        plain({}).union(batch),
        DataProto.concat([batch[:1], batch[1:]]),
        copy.deepcopy(batch),
        copy.copy(batch),
        batch.to("cpu"),
        pickle.loads(pickle.dumps(batch)),
        DataProto.load_from_disk(tmp_path / "batch"),
        collate_fn([batch[row] for row in range(3)]),
        DataProto(TensorDict(dict(batch.batch.items()), batch_size=[3]), dict(batch.non_tensor_batch)),
        DataProto.from_tensordict(batch.to_tensordict()),
        batch.repeat(2, interleave=False)[:3],
        batch.select().rename("ref_log_prob", "x").rename("x", "ref_log_prob"),
    ]
    for other in others:
        assert torch.equal(other["ref_log_probs"], batch.batch["ref_log_prob"])
        assert torch.equal(other.batch["ref_log_probs"], batch.batch["ref_log_prob"])
        assert other.non_tensor_batch["ground_truth"].tolist() == ["0", "1", "2"]
        assert set(other.batch.keys()) == {"ref_log_prob"}
        assert set(other.non_tensor_batch) == {"reward_model"}
    row = batch[1]
    assert row.batch["ref_log_probs"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert row.non_tensor_batch["ground_truth"] == row.non_tensor_batch.get("ground_truth") == "1"
    popped = batch.pop(["ref_log_prob"])
    assert "ref_log_probs" not in batch.batch.keys()
    assert torch.equal(popped["ref_log_probs"], popped.batch["ref_log_prob"])
    with pytest.raises(KeyError, match="ref_log_probs"):
        popped.rename("ref_log_probs", "x")


def answered(seed: int, cut: int = 0) -> tuple[DataProto, DataProto]:
    """Prompts [4, 6] and a generated batch of them; `cut` columns of padding are missing in the latter."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7 - cut, (4, 1), generator=generator)
    mask = (torch.arange(6) >= 6 - lengths).long()
    ids = torch.randint(5, 99, (4, 6), generator=generator) * mask
    responses = torch.randint(5, 99, (4, 3), generator=generator)
    prompts = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    )
    whole = torch.cat([mask, torch.ones(4, 3, dtype=torch.int64)], dim=1)[:, cut:]
    generated = DataProto.from_dict(
        {
            "prompts": ids[:, cut:],
            "responses": responses,
            "input_ids": torch.cat([ids, responses], dim=1)[:, cut:],
            "attention_mask": whole,
            "position_ids": (whole.cumsum(-1) - 1).clamp(min=0),
        }
    )
    return prompts, generated


@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("seed", range(10))
def test_prompts_join_with_their_answers_and_with_no_others(seed, cut):
    prompts, generated = answered(seed, cut)
    for joined in (prompts.select().union(generated), generated.select().union(prompts)):
        assert all(torch.equal(joined[name], value) for name, value in generated.batch.items())
    for name in ("input_ids", "attention_mask", "position_ids"):
        other = prompts.select(deepcopy=True)
        other.batch[name][seed % 4, -1] += 1 if name != "attention_mask" else -1
        with pytest.raises(ValueError, match=rf"^union: {name!r} "):
            other.union(generated)
    more = prompts.select(deepcopy=True)
    more.batch["attention_mask"][:] = 1
    with pytest.raises(ValueError, match="attention_mask"):
        more.union(generated)


@pytest.mark.parametrize("rows", [1, 5, 8, 17])
@pytest.mark.parametrize("n_parts", [1, 2, 3, 8])
def test_a_batch_splits_into_a_number_of_parts(rows, n_parts):
    batch = plain({"x": torch.arange(rows), "name": object_array(list(range(rows)))})
    parts = batch.split(n_parts=n_parts)
    sizes = [len(part) for part in parts]
    assert len(parts) == n_parts
    assert max(sizes) - min(sizes) <= 1
    assert [value for part in parts for value in part["x"].tolist()] == list(range(rows))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, r"\bsplit_size .*\bn_parts "),
        ({"split_size": 2, "n_parts": 2}, r"\bsplit_size .*\bn_parts "),
        ({"n_parts": 0}, r"\bn_parts is 0"),
        ({"split_size": 0}, r"\bsplit_size is 0"),
    ],
)
def test_a_split_without_one_valid_size_is_refused(arguments, named):
    with pytest.raises(ValueError, match=rf"^DataProto\.split: .*{named}"):
        plain({"x": torch.arange(4)}).split(**arguments)
