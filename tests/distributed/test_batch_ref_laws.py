"""Any sequence of operations on a BatchRef gives what it gives on the DataProto it stands for."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.workers import rollout_batch
from verl.protocol import DataProto
from verl.single_controller.ray import BatchRef
from verl.utils.nested import deep_equal

PROMPT, RESPONSE, PAD = 6, 10, 99
SEQUENCE = {"input_ids", "attention_mask", "position_ids"}


def trim(data: DataProto) -> DataProto:
    """A plain batch cut to its longest prompt and response, with positions 0 in the padding: what arrives."""
    mask = data.batch["attention_mask"]
    response_width = data.batch["responses"].shape[1]
    prompt_width = mask.shape[1] - response_width
    p = int(mask[:, :prompt_width].sum(1).max())
    r = int(mask[:, prompt_width:].sum(1).max())
    cut = data.select()
    for key, value in data.batch.items():
        if key == "prompts":
            cut.batch[key] = value[:, prompt_width - p :]
        elif key in SEQUENCE:
            cut.batch[key] = value[:, prompt_width - p : prompt_width + r]
        elif value.ndim == 2:
            cut.batch[key] = value[:, :r]
    cut.batch["position_ids"] = cut.batch["position_ids"] * cut.batch["attention_mask"]
    return cut


def random_program(rng: random.Random, steps: int) -> None:
    seeds = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
    plain = trim(rollout_batch(seeds, PROMPT, RESPONSE, PAD))
    stored = BatchRef.from_dataproto(plain)
    for _ in range(steps):
        plain, stored = OPERATIONS[rng.randrange(len(OPERATIONS))](rng, plain, stored)
        assert len(plain) == len(stored)
        plain = trim(plain)
        fetched = stored.fetch()
        assert set(fetched.batch.keys()) == set(plain.batch.keys())
        for key, value in plain.batch.items():
            assert deep_equal(fetched.batch[key], value.contiguous()), key
        for key, array in plain.non_tensor_batch.items():
            assert deep_equal(fetched.non_tensor_batch[key], array), key


def take(rng, plain, stored):
    rows = [rng.randrange(len(plain)) for _ in range(rng.randint(1, 2 * len(plain)))]
    return plain.select_idxs(rows), stored.select_idxs(rows)


def slice_rows(rng, plain, stored):
    start = rng.randrange(len(plain))
    step = rng.choice([1, 2, -1])
    part = slice(start, None, step)
    return plain[part], stored[part]


def reorder(rng, plain, stored):
    order = list(range(len(plain)))
    rng.shuffle(order)
    plain.reorder(order)
    stored.reorder(order)
    return plain, stored


def repeat(rng, plain, stored):
    if len(plain) > 24:
        return slice_rows(rng, plain, stored)
    times, interleave = rng.randint(1, 3), rng.random() < 0.5
    return plain.repeat(times, interleave), stored.repeat(times, interleave)


def split_and_concat(rng, plain, stored):
    size = rng.randint(1, len(plain))
    parts = list(range((len(plain) + size - 1) // size))
    rng.shuffle(parts)
    cut, cut_stored = plain.split(size), stored.split(size)
    return DataProto.concat([cut[i] for i in parts]), DataProto.concat([cut_stored[i] for i in parts])


def new_token_column(rng, plain, stored):
    value = plain.batch["response_mask"].float() * rng.random()
    for batch in (plain, stored):
        batch.batch["advantages"] = value.clone()
    return plain, stored


def write_in_place(rng, plain, stored):
    row = rng.randrange(len(plain))
    for batch in (plain, stored):
        batch.batch["score"] = batch.batch["score"].clone()
        batch.batch["score"][row] = -1.0
    return plain, stored


def pop_and_union(rng, plain, stored):
    popped, popped_stored = plain.pop(["score"], ["uid"]), stored.pop(["score"], ["uid"])
    if rng.random() < 0.5:
        popped_stored = popped_stored.fetch()
    return plain.union(popped), stored.union(popped_stored)


def look_rename_and_set(rng, plain, stored):
    for batch in (plain, stored):
        _ = batch.batch["responses"]
        batch.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"][::-1].copy()
        batch.rename(["score", "uid"], ["points", "names"])
        batch.batch["score"] = batch.batch["points"] * 2
        batch.union(DataProto.from_dict({}, {"uid": batch.non_tensor_batch["names"].tolist()}))
        batch.pop(["points"], ["names"])
    return plain, stored


def travel(rng, plain, stored):
    """Through pickle, as to a worker: only the parts in use go along."""
    import ray

    return plain, ray.get(ray.put(stored))


OPERATIONS = [
    take,
    slice_rows,
    reorder,
    repeat,
    split_and_concat,
    new_token_column,
    write_in_place,
    pop_and_union,
    look_rename_and_set,
    travel,
]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_agree(ray_cluster, seed):
    random_program(random.Random(seed), steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_programs_agree(ray_cluster, block):
    for seed in range(100 + 20 * block, 120 + 20 * block):
        random_program(random.Random(seed), steps=15)


def test_a_large_batch_of_rows_keeps_its_order(ray_cluster):
    rows = 5000
    data = DataProto.from_dict({"id": torch.arange(rows)}, {"name": np.arange(rows).astype(str).astype(object)})
    stored = BatchRef.from_dataproto(data)
    order = np.random.default_rng(0).permutation(rows)
    shuffled = DataProto.concat(stored.select_idxs(order).chunk(10)[::-1])
    expected = np.concatenate(np.split(order, 10)[::-1])
    assert shuffled.batch["id"].tolist() == expected.tolist()
    assert shuffled.non_tensor_batch["name"].tolist() == expected.astype(str).tolist()
