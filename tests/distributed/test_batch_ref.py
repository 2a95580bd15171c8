"""BatchRef: behaves like the DataProto it stands for, moves only what is named, stores no padding."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.support.workers import RolloutWorker, prompt_length, response_length, rollout_batch
from verl.protocol import DataProto, object_array, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.ray import BatchRef, RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.column_store import traffic
from verl.utils.nested import deep_equal

PROMPT, RESPONSE, PAD = 8, 16, 99


@pytest.fixture(scope="module")
def rollers(ray_roles: dict[str, RayWorkerGroup]) -> RayWorkerGroup:
    group = ray_roles["RolloutWorker"]  # of width PROMPT + RESPONSE, padded with PAD
    group.setup(tp=1)
    return group


def generate(rollers: RayWorkerGroup, seeds: list[int]) -> BatchRef:
    return rollers.generate(DataProto.from_dict({"seed": torch.tensor(seeds)}))


def trimmed(seeds: list[int]) -> DataProto:
    """What arrives: the same rows padded only to the longest present."""
    whole = rollout_batch(seeds, PROMPT, RESPONSE, PAD)
    p = max(prompt_length(seed, PROMPT) for seed in seeds)
    r = max(response_length(seed, RESPONSE) for seed in seeds)
    narrow = rollout_batch(seeds, PROMPT, RESPONSE, PAD)
    for key, value in whole.batch.items():
        if value.ndim == 2 and value.shape[1] == PROMPT:
            narrow.batch[key] = value[:, PROMPT - p :].clone()
        elif value.ndim == 2 and value.shape[1] == RESPONSE:
            narrow.batch[key] = value[:, :r].clone()
        elif value.ndim == 2:
            narrow.batch[key] = value[:, PROMPT - p : PROMPT + r].clone()
    # Positions in the padding mean nothing and come back as 0.
    narrow.batch["position_ids"] *= narrow.batch["attention_mask"]
    return narrow


def assert_same(batch: DataProto, expected: DataProto) -> None:
    found = batch.fetch() if isinstance(batch, BatchRef) else batch
    assert set(found.batch.keys()) == set(expected.batch.keys())
    for key, value in expected.batch.items():
        assert deep_equal(found.batch[key], value), key
    for key, array in expected.non_tensor_batch.items():
        assert deep_equal(found.non_tensor_batch[key], array), key
    assert found.meta_info == expected.meta_info


def test_ranks_that_got_fillers_only_change_nothing(rollers):
    """The last validation batch: fewer rows than ranks."""
    assert_same(generate(rollers, [3]), trimmed([3]))


def test_what_workers_made_is_what_is_fetched_without_padding(rollers):
    seeds = [3, 1, 4, 2, 7, 5]
    batch = generate(rollers, seeds)
    assert isinstance(batch, DataProto)
    assert len(batch) == 6
    assert_same(batch, trimmed(seeds))
    assert batch.lengths.prompt.tolist() == [prompt_length(s, PROMPT) for s in seeds]
    assert batch.lengths.response.tolist() == [response_length(s, RESPONSE) for s in seeds]


def test_row_operations_equal_those_of_a_dataproto(rollers):
    seeds = [3, 1, 4, 2, 7, 5]
    batch = generate(rollers, seeds)
    assert_same(batch[[4, 0, 0]], trimmed([7, 3, 3]))
    assert_same(batch[1:5:2], trimmed([1, 2]))
    assert_same(batch[::-1], trimmed(seeds[::-1]))
    assert_same(batch[np.array([True, False, False, True, False, False])], trimmed([3, 2]))
    assert_same(batch.repeat(2), trimmed([s for s in seeds for _ in range(2)]))
    assert_same(batch.repeat(2, interleave=False), trimmed(seeds + seeds))
    assert_same(batch.sample_level_repeat([0, 2, 0, 0, 0, 1]), trimmed([1, 1, 5]))
    assert_same(DataProto.concat(batch.split(4)), trimmed(seeds))
    assert_same(DataProto.concat(batch.chunk(3)), trimmed(seeds))
    assert_same(DataProto.concat([batch, generate(rollers, [9, 10])]), trimmed([*seeds, 9, 10]))
    padded, pad_size = pad_dataproto_to_divisor(batch, 4)
    assert_same(padded, trimmed([*seeds, 3, 1]))
    assert_same(unpad_dataproto(padded, pad_size), trimmed(seeds))
    batch.reorder([5, 4, 3, 2, 1, 0])
    assert_same(batch, trimmed(seeds[::-1]))
    minis = list(batch.make_iterator(2, epochs=1, seed=1, dataloader_kwargs={"shuffle": True}))
    assert sorted(uid for mini in minis for uid in mini.non_tensor_batch["uid"]) == sorted(f"u{s}" for s in seeds)
    assert batch[2].non_tensor_batch["uid"] == "u2"
    assert int(batch[-1].batch["score"]) == 3


def test_prompts_and_their_answers_join_and_aliases_are_read_from_the_store(rollers):
    seeds = [3, 1, 4]
    whole = rollout_batch(seeds, PROMPT, RESPONSE, PAD)
    names = ["input_ids", "attention_mask"]
    prompts = DataProto.from_dict({name: whole.batch[name][:, :PROMPT] for name in names})
    for joined in (generate(rollers, seeds).union(prompts.select()), prompts.select().union(generate(rollers, seeds))):
        assert_same(joined, trimmed(seeds))
    batch = generate(rollers, seeds)
    batch.batch["ref_log_prob"] = torch.rand(3, 4)
    batch.non_tensor_batch["reward_model"] = object_array([{"ground_truth": seed} for seed in seeds])
    for part in (batch, batch[[0, 1, 2]]):
        assert torch.equal(part["ref_log_probs"], part.batch["ref_log_prob"])
        assert part.non_tensor_batch["ground_truth"].tolist() == seeds
        assert [len(piece) for piece in part.split(n_parts=2)] == [1, 2]
        chosen = part.select(["ref_log_probs"], ["ground_truth"])
        assert (list(chosen.batch.keys()), list(chosen.non_tensor_batch)) == (["ref_log_prob"], ["reward_model"])


def test_column_operations_equal_those_of_a_dataproto(rollers):
    batch = generate(rollers, [3, 1])
    some = batch.select(["responses", "score"], ["uid"], [])
    assert_same(some, trimmed([3, 1]).select(["responses", "score"], ["uid"], []))
    rest = batch.select()
    popped = rest.pop(["responses"], ["uid"], ["pad"])
    assert set(popped.batch.keys()) == {"responses"}
    assert "responses" not in rest.batch
    assert "uid" not in rest.non_tensor_batch
    assert rest.meta_info == {}
    assert_same(rest.union(popped), trimmed([3, 1]))
    renamed = batch.select(["score"], []).rename("score", "reward")
    assert renamed.batch["reward"].tolist() == [3.0, 1.0]
    with pytest.raises(KeyError, match=r"nothing.*responses"):
        batch.select(["nothing"])
    with pytest.raises(KeyError, match=r"'nothing'.*\bscore\b"):
        _ = batch.batch["nothing"]
    assert_same(copy.deepcopy(batch), trimmed([3, 1]))


def test_a_batch_can_be_worked_on_by_ranks_that_did_not_make_it(rollers):
    seeds = [3, 1, 4, 2, 7, 5, 6]
    batch = generate(rollers, seeds)
    batch.reorder([6, 0, 3, 1, 5, 2, 4])
    order = [seeds[i] for i in [6, 0, 3, 1, 5, 2, 4]]
    rows = rollers.look(batch).non_tensor_batch["row"]
    halves = [trimmed(order[:4]), trimmed([*order[4:], order[0]])]  # the second shard has a filler row
    expected = [half[i] for half in halves for i in range(4)][:7]
    for row, item in zip(rows, expected, strict=True):
        assert row["responses"] == item.batch["responses"].tolist()
        assert row["input_ids"] == item.batch["input_ids"].tolist()
        assert row["uid"] == item.non_tensor_batch["uid"]


def test_results_without_a_mask_take_the_lengths_of_their_rows(rollers):
    seeds = [3, 1, 4, 2]
    batch = generate(rollers, seeds)
    batch.reorder([3, 2, 1, 0])
    batch.union(rollers.log_probs(batch))
    want = trimmed(seeds[::-1])
    expected = want.batch["responses"].float() * 0.5 * want.batch["response_mask"]
    assert torch.equal(batch.batch["old_log_probs"], expected), "rubbish in the padding is not kept"
    assert torch.equal(batch[[1]].batch["old_log_probs"], expected[[1], : response_length(4, RESPONSE)])


def test_columns_computed_on_the_controller_join_the_batch(rollers):
    batch = generate(rollers, [3, 1, 4, 2])
    advantages = torch.where(batch.batch["response_mask"].bool(), batch.batch["score"][:, None], 0.0)
    batch.batch["advantages"] = advantages
    batch.union(DataProto.from_dict({"token_level_scores": advantages * 2}, {"note": list("abcd")}))
    batch.non_tensor_batch["extra"] = np.array([{"k": i} for i in range(4)], dtype=object)
    batch.reorder([1, 0, 3, 2])
    rows = rollers.look(batch).non_tensor_batch["row"]
    assert [row["extra"]["k"] for row in rows] == [1, 0, 3, 2]
    assert [row["note"] for row in rows] == ["b", "a", "d", "c"]
    assert [max(row["advantages"]) for row in rows] == [1.0, 3.0, 2.0, 4.0]
    assert [max(row["token_level_scores"]) for row in rows] == [2.0, 6.0, 4.0, 8.0]


def test_writing_into_a_fetched_column_counts(rollers):
    batch = generate(rollers, [3, 1])
    other = batch.select()
    batch.batch["score"][0] = -5
    batch.batch["responses"][:, :1].zero_()  # through a view
    rows = rollers.look(batch).non_tensor_batch["row"]
    assert [row["score"] for row in rows] == [-5.0, 1.0]
    assert [row["responses"][0] for row in rows] == [0, 0]
    assert other.batch["score"].tolist() == [3.0, 1.0], "the stored column is untouched"
    with pytest.raises(ValueError, match="read-only"):
        batch.non_tensor_batch["uid"][0] = "x"


def test_columns_travel_when_they_are_needed_and_once(rollers):
    batch = generate(rollers, [3, 1, 4])
    stored, fetched = traffic.stored, traffic.fetched
    batch.batch["token_level_scores"] = batch.batch["response_mask"].float()
    batch.non_tensor_batch["tests"] = np.array(["x" * 1000] * 3, dtype=object)
    batch.union(DataProto.from_dict({}, {"truth": list("abc")}))
    once = traffic.fetched
    assert once > fetched
    _ = batch.batch["response_mask"], batch.batch["token_level_scores"], batch.non_tensor_batch["truth"]
    rollers.look(batch.select(["responses", "score"], ["uid"]))
    assert traffic.fetched - once == 0, "what was fetched or set is here"
    assert traffic.stored == stored, "what nobody was sent is not stored"
    rows = rollers.look(batch).non_tensor_batch["row"]
    assert [row["truth"] for row in rows] == ["a", "b", "c"]
    sent = traffic.stored
    assert sent > stored
    rollers.look(batch)
    assert traffic.stored == sent, "stored once"
    batch.batch["token_level_scores"][0, 0] = 9.0
    assert rollers.look(batch).non_tensor_batch["row"][0]["token_level_scores"][0] == 9.0, "and again when written"


def test_union_refuses_columns_that_disagree_and_accepts_those_that_agree(rollers):
    batch = generate(rollers, [3, 1])
    batch.union(batch.select(["score"]))
    batch.union(DataProto.from_dict({"score": torch.tensor([3.0, 1.0])}))
    with pytest.raises(ValueError, match=r"^BatchRef\.union: 'score' "):
        batch.union(DataProto.from_dict({"another": torch.ones(2), "score": torch.tensor([3.0, 2.0])}, {"a": [1, 2]}))
    assert "another" not in batch.batch, "all or nothing"
    assert "a" not in batch.non_tensor_batch
    with pytest.raises(ValueError, match=r"^BatchRef\.union: 2 .*\b3 rows"):
        batch.union(DataProto.from_dict({"new": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"meta_info\['pad'\]"):
        batch.union(DataProto(meta_info={"pad": 1}))
    with pytest.raises(ValueError, match=r"'new' .*\b3 rows.*\b2\."):
        batch.batch["new"] = torch.zeros(3)


def test_a_dataproto_can_absorb_a_batch_ref(rollers):
    prompts = DataProto.from_dict({"id": torch.tensor([0, 1])})
    merged = prompts.union(generate(rollers, [3, 1]))
    assert merged is prompts
    assert merged.batch["score"].tolist() == [3.0, 1.0]
    assert merged.non_tensor_batch["uid"].tolist() == ["u3", "u1"]


def test_per_token_columns_outside_the_schema(rollers):
    batch = generate(rollers, [3, 1, 4])
    blank = batch.batch["response_mask"].float() * 7
    batch.batch["my_weights"] = blank
    assert batch[[1]].batch["my_weights"].shape == (1, response_length(1, RESPONSE)), "blank in the padding: trimmed"
    width = batch.batch["responses"].shape[1]
    features = torch.arange(3 * width).float().view(3, width)  # as wide as the responses, but not per token
    batch.batch["features"] = features
    assert torch.equal(batch[[1]].batch["features"], features[[1]]), "not blank in the padding: kept whole"


def test_a_mask_of_another_form_is_stored_whole(ray_cluster):
    holes = DataProto.from_dict({"attention_mask": torch.tensor([[1, 0, 1], [0, 1, 1]]), "responses": torch.ones(2, 1)})
    stored = BatchRef.from_dataproto(holes)
    assert stored.lengths is None
    assert_same(stored, holes)
    empty = BatchRef.from_dataproto(holes[:0])
    assert len(empty.fetch()) == 0
    assert BatchRef.from_dataproto(DataProto(meta_info={"a": 1})).fetch().meta_info == {"a": 1}


def test_dtypes_and_shapes_survive_the_store(ray_cluster):
    data = DataProto.from_dict(
        {
            "bf16": torch.randn(3, 2).bfloat16(),
            "fp8": torch.randn(3, 2).to(torch.float8_e4m3fn).view(torch.uint8),
            "bool": torch.tensor([[True], [False], [True]]),
            "scalar": torch.arange(3),
            "wide": torch.randn(3, 2, 0),
            "deep": torch.randn(3, 2, 4).transpose(1, 2),
        },
        {"ragged": [[1], [], [2, 3]], "text": ["a", "b", "c"], "number": np.arange(3.0)},
    )
    stored = BatchRef.from_dataproto(data)
    assert_same(stored, data)
    assert_same(stored[[2, 0]], data[[2, 0]])


@pytest.mark.slow
def test_chained_calls_move_only_indices_and_named_columns_through_the_controller(cpu_pool):
    """generate on dp1×tp2 → balance → union(scores) → update on dp2."""
    prompt, response, rows = 64, 1024, 64
    with RayWorkerGroup(cpu_pool, RayClassWithInitArgs(RolloutWorker, prompt, response, PAD)) as group:
        group.setup(tp=2)
        before = (traffic.fetched, traffic.stored)
        batch = generate(group, list(range(rows)))
        lengths = batch.lengths.prompt + batch.lengths.response
        order = np.argsort(-lengths, kind="stable")
        batch.reorder(np.concatenate([order[0::2], order[1::2]]))
        scores = DataProto.from_dict({"reward": torch.arange(rows).float()})
        batch.union(scores)
        results = group.update(batch)
        moved = traffic.fetched + traffic.stored - sum(before)
    assert [result["rows"] for result in results] == [32, 32]
    assert sum(result["tokens"] for result in results) == sum(response_length(i, response) for i in range(rows))
    assert moved < 0.01 * sum(result["nbytes"] for result in results)
