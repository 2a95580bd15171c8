"""Prompts epoch after epoch: none lost, none twice, also when some come back and the run is resumed in between."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config import DataConfig, as_config
from verl.protocol import object_array
from verl.trainer.ppo.prompts import PromptStream, make_dataloader, make_sampler
from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler
from verl.utils.nested import load_plain, save_plain


class Numbers(torch.utils.data.Dataset):
    """Rows that know their number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict:
        return {"input_ids": torch.tensor([row]), "uid": f"u{row}", "extra_info": {"index": row}}


def make_stream(rows: int = 10, batch: int = 3) -> tuple[PromptStream, object]:
    data = {"train_batch_size": batch, "gen_batch_size": batch, "dataloader_num_workers": 0, "seed": 7}
    config = as_config(DataConfig, data)
    dataset = Numbers(rows)
    loader = make_dataloader(dataset, config, sampler=make_sampler(config, dataset))
    return PromptStream(loader, total_epochs=2, batch_size=4), loader


def numbers(prompts) -> list[int]:
    return prompts.batch["input_ids"][:, 0].tolist()


def test_any_number_of_prompts_in_the_order_of_the_dataloader():
    stream, loader = make_stream()
    whole = [row for batch in loader for row in batch["input_ids"][:, 0].tolist()]
    stream, _ = make_stream()
    assert numbers(stream.take(2)) + numbers(stream.take(5)) + numbers(stream.take(2)) == whole
    assert stream.epoch == 0
    stream.take(1)
    assert stream.epoch == 1


def test_prompts_put_back_come_first():
    stream, _ = make_stream()
    first = stream.take(3)
    stream.put_back(first[1:])
    assert stream.queued == 2
    assert numbers(stream.take(3))[:2] == numbers(first)[1:]
    assert stream.queued == 2, "of the batch drawn for the third, two are left"


@settings(max_examples=20)
@given(st.data())
def test_a_resumed_stream_goes_on_as_an_uninterrupted_one(tmp_path_factory, data):
    """Take, put some back, take … ; cut anywhere: the same prompts follow, and each epoch has each row once."""
    moves = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=8))
    cut = data.draw(st.integers(0, len(moves)))
    stream, loader = make_stream()
    handed_out: list[list[int]] = []
    for number, (count, back) in enumerate(moves):
        if number == cut:
            file = tmp_path_factory.mktemp("state") / "state.pt"
            save_plain({"dataloader": stream.loader_state(), "prompts": stream.state_dict()}, file)
        taken = stream.take(count)
        kept = max(0, count - back)
        handed_out.append(numbers(taken)[:kept])
        if kept < count:
            stream.put_back(taken[kept:])
    used = [row for rows in handed_out for row in rows]
    for epoch in range(0, len(used), 9):
        assert len(set(used[epoch : epoch + 9])) == len(used[epoch : epoch + 9]), "an epoch has nine of ten rows, once"
    if cut == len(moves):
        return
    resumed, loader = make_stream()
    state = load_plain(file)
    loader.load_state_dict(state["dataloader"])
    resumed.load_state_dict(state["prompts"])
    for (count, back), expected in zip(moves[cut:], handed_out[cut:], strict=True):
        taken = resumed.take(count)
        assert numbers(taken)[: max(0, count - back)] == expected
        if back:
            resumed.put_back(taken[max(0, count - back) :])


def test_the_next_batch_is_fetched_while_a_step_runs_and_counts_once_it_is_taken(caplog):
    stream, loader = make_stream(rows=6, batch=3)
    with caplog.at_level("INFO"):
        stream.take(3)
        assert stream.prefetched.result()[1] is False, "the second batch of the first epoch is there"
        assert loader.state_dict()["batches"] == 2
        assert stream.loader_state()["batches"] == 1
        stream.take(3)
        assert stream.prefetched.result()[1], "and then the first of the second epoch"
        assert stream.epoch == 0
        assert [record.message for record in caplog.records] == ["Epoch 1/2"]
        stream.take(1)
    assert stream.epoch == 1
    assert caplog.records[-1].message == "Epoch 2/2"


def test_a_sampler_that_learns_is_not_asked_before_it_has(tmp_path):
    class Learner(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config):
            self.asked = 0

        def __len__(self):
            return 6

        def __iter__(self):
            for row in range(6):
                self.asked += 1
                yield row

        def update(self, batch):
            pass

    sampler = Learner(None, None)
    config = as_config(DataConfig, {"train_batch_size": 3, "gen_batch_size": 3, "dataloader_num_workers": 2})
    stream = PromptStream(make_dataloader(Numbers(6), config, sampler=sampler), total_epochs=1, batch_size=2)
    stream.take(3)
    assert sampler.asked == 3
    assert stream.prefetched is None


def test_a_dataset_that_hangs_does_not_delay_the_end_of_the_process(monkeypatch):
    """The interpreter joins all threads that are not daemons."""
    monkeypatch.setattr("verl.trainer.ppo.prompts._LAST_FETCH_S", 0.1)
    stream, _ = make_stream()
    release = threading.Event()
    monkeypatch.setattr(stream, "next_rows", release.wait)
    before = set(threading.enumerate())
    stream.prefetch()
    stream.close()
    assert [thread.daemon for thread in set(threading.enumerate()) - before] == [True]
    release.set()


def test_an_epoch_without_a_whole_batch_is_named():
    stream, _ = make_stream()
    stream.dataloader = []  # nothing is fetched yet
    with pytest.raises(ValueError, match=r"^data\.sampler: "):
        stream.take(1)


def test_the_columns_that_are_not_tensors_survive_a_resume(tmp_path):
    stream, _ = make_stream()
    taken = stream.take(3)
    stream.put_back(taken)
    save_plain(stream.state_dict(), tmp_path / "state.pt")
    resumed, _ = make_stream()
    resumed.load_state_dict(load_plain(tmp_path / "state.pt"))
    again = resumed.take(3)
    for name in ("uid", "extra_info"):
        assert again.non_tensor_batch[name].tolist() == taken.non_tensor_batch[name].tolist()
        assert again.non_tensor_batch[name].dtype == object_array([]).dtype


def test_a_resumed_stream_with_larger_batches_goes_on_to_the_next_epoch_where_less_than_one_is_left():
    stream, _ = make_stream(rows=10, batch=2)
    stream.take(8)
    place, saved = stream.loader_state(), stream.state_dict()
    second, other = make_stream(rows=10, batch=5)
    other.load_state_dict(place)
    second.load_state_dict(saved)
    assert sorted(numbers(second.take(10))) == list(range(10))


def test_prompts_that_waited_since_the_run_was_another_are_handed_out_with_those_of_this_one():
    """Of another `data.max_prompt_length`, or of an asynchronous run, which keeps chats."""
    stream, _ = make_stream()
    before = stream.take(1)
    before.batch["input_ids"] = torch.tensor([[0, 42]])
    before.non_tensor_batch["raw_prompt"] = object_array([["a chat"]])
    stream.put_back(before)
    taken = stream.take(3)
    assert taken.batch["input_ids"][0].tolist() == [0, 42]
    assert taken.batch["input_ids"][1:, 0].tolist() == [0, 0]
    assert taken.non_tensor_batch["raw_prompt"].tolist() == [["a chat"], None, None]
