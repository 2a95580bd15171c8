"""The prompt loader: every prompt exactly once per epoch, also when the run stops anywhere and goes on elsewhere."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sqlite3
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Sampler, SequentialSampler

from tests.support.tiny import tiny_tokenizer
from verl.config import DataConfig, as_config
from verl.trainer.common.loader import BatchLoader
from verl.trainer.ppo.prompts import PromptStream, make_dataloader, make_sampler
from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler, EpochSampler, RLHFDataset
from verl.utils.nested import load_plain, save_plain


class Numbers:
    """Row i is i; a worker process says so by its id."""

    read_in_thread = True

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return self._rows

    def __getitem__(self, item):
        return item, os.getpid()


def loader_of(rows, batch_size, workers, sampler=None, drop_last=True):
    sampler = sampler or EpochSampler(range(rows), seed=3, batch_size=batch_size)
    return BatchLoader(
        Numbers(rows), sampler, batch_size=batch_size, drop_last=drop_last, num_workers=workers, collate_fn=list
    )


def epochs(loader):
    return itertools.chain.from_iterable(iter(loader) for _ in itertools.count())


def endless(loader):
    """Batches of row numbers, epoch after epoch, as training takes them."""
    return ([row for row, _ in batch] for batch in epochs(loader))


def config_of(**changes):
    return as_config(DataConfig, {"train_batch_size": 4, "gen_batch_size": 4, "dataloader_num_workers": 0, **changes})


def saved_and_loaded(state, folder):
    """As a checkpoint keeps it: plain data only."""
    save_plain(state, folder / "state.pt")
    return load_plain(folder / "state.pt")


def check_every_row_comes_once_per_epoch(folder, rows, batch_size, stops, workers):
    """A run that stops after each of `stops` batches, loading with another number of processes every time."""
    per_epoch = rows // batch_size
    order = epochs(EpochSampler(range(rows), seed=3, batch_size=batch_size))
    expected = [list(itertools.islice(order, batch_size)) for _ in range(2 * per_epoch + 2)]
    seen, state = [], None
    for number, stop in zip(workers, [*stops, len(expected)], strict=True):
        loader = loader_of(rows, batch_size, number)
        if state is not None:
            loader.load_state_dict(state)
        seen += itertools.islice(endless(loader), stop - len(seen))
        state = saved_and_loaded(loader.state_dict(), folder)
    assert seen == expected
    for epoch in range(2):
        drawn = [row for batch in seen[epoch * per_epoch : (epoch + 1) * per_epoch] for row in batch]
        assert len(set(drawn)) == len(drawn) == per_epoch * batch_size


@settings(max_examples=50)
@given(rows=st.integers(1, 40), batch_size=st.integers(1, 7), data=st.data())
def test_every_row_comes_once_per_epoch_wherever_a_run_stops(tmp_path_factory, rows, batch_size, data):
    batch_size = min(batch_size, rows)
    stops = sorted(data.draw(st.tuples(*[st.integers(0, 2 * (rows // batch_size) + 1)] * 2), label="stops"))
    check_every_row_comes_once_per_epoch(tmp_path_factory.mktemp("state"), rows, batch_size, stops, (0, 0, 0))


@pytest.mark.parametrize(
    ("stops", "workers"), [((2, 7), (2, 1, 0)), ((5, 6), (1, 0, 2)), ((0, 10), (1, 2, 1))], ids=["within", "at", "ends"]
)
def test_every_row_comes_once_per_epoch_however_many_processes_load(tmp_path, stops, workers):
    """Five batches an epoch: stops within epochs, at their ends, before the first batch; workers are ahead of each."""
    check_every_row_comes_once_per_epoch(tmp_path, 23, 4, stops, workers)


@pytest.mark.slow
def test_prompts_of_real_files_are_resumed_with_their_uids(tmp_path):
    rows = [{"prompt": f"number {i}", "data_source": "x"} for i in range(23)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(train_files=[str(tmp_path / "a.jsonl")], max_prompt_length=64)

    def loader():
        data = RLHFDataset(config.train_files, tiny_tokenizer(), config)
        return make_dataloader(data, config, sampler=make_sampler(config, data))

    def uids(source, count):
        return [batch["uid"].tolist() for batch in itertools.islice(epochs(source), count)]

    expected = uids(loader(), 12)
    first, second = loader(), loader()
    seen = uids(first, 7)
    second.load_state_dict(saved_and_loaded(first.state_dict(), tmp_path))
    assert seen + uids(second, 5) == expected
    assert len(set(itertools.chain(*expected[:5]))) == 20
    rows[-1]["prompt"] = "another"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"^data\.train_files: .*a\.jsonl: 23\b"):
        loader().load_state_dict(first.state_dict())


def test_a_sampler_without_a_state_begins_anew_and_what_was_handed_out_is_skipped(caplog):
    def loader():
        return loader_of(10, 3, 0, SequentialSampler(range(10)), drop_last=False)

    assert list(itertools.islice(endless(loader()), 5)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9], [0, 1, 2]]
    first, second = loader(), loader()
    list(itertools.islice(endless(first), 2))
    second.load_state_dict(first.state_dict())
    assert "SequentialSampler has no state_dict" in caplog.text
    # Saved again before the next batch, it is still there.
    third = loader()
    third.load_state_dict(second.state_dict())
    for resumed in (second, third):
        assert list(itertools.islice(endless(resumed), 3)) == [[6, 7, 8], [9], [0, 1, 2]]


class Learner(AbstractCurriculumSampler):
    """Draws the row it was told last."""

    def __init__(self, data_source, data_config):
        self.told = 0

    def __len__(self):
        return 6

    def __iter__(self):
        return (self.told for _ in range(6))

    def update(self, batch):
        self.told = batch

    def state_dict(self):
        return {"told": self.told}

    def load_state_dict(self, state):
        self.told = state["told"]


def test_a_sampler_that_learns_draws_nothing_ahead_and_is_saved_with_what_it_learned():
    loader = loader_of(6, 1, 2, Learner(None, None))
    batches = iter(loader)
    assert next(batches) == [(0, os.getpid())]
    PromptStream(loader, 1, 4).update_sampler(5)
    assert next(batches) == [(5, os.getpid())]
    PromptStream(loader, 1, 4).update_sampler(3)
    assert loader.state_dict()["sampler"] == {"told": 3}
    PromptStream(object(), 1, 4).update_sampler(1)  # a dataloader of the user's may be anything


class Told(Numbers):
    """Says when the last row is asked for."""

    def __init__(self, rows):
        super().__init__(rows)
        self.last = threading.Event()

    def __getitem__(self, item):
        if item == len(self) - 1:
            self.last.set()
        return super().__getitem__(item)


def test_without_processes_the_next_batch_is_made_while_one_is_used():
    rows = Told(4)
    loader = BatchLoader(rows, SequentialSampler(rows), batch_size=2, drop_last=True, num_workers=0, collate_fn=list)
    batches = iter(loader)
    assert [row for row, _ in next(batches)] == [0, 1]
    assert rows.last.wait(20)
    assert loader.state_dict()["batches"] == 1
    assert [row for row, _ in next(batches)] == [2, 3]


def test_a_dataset_of_the_users_is_read_by_the_thread_that_made_it():
    class Stored:
        def __init__(self):
            self._files = sqlite3.connect(":memory:")

        def __len__(self):
            return 4

        def __getitem__(self, item):
            return self._files.execute("select ?", (item,)).fetchone()[0]

    rows = Stored()
    order = SequentialSampler(rows)
    loader = BatchLoader(rows, order, batch_size=2, drop_last=True, num_workers=0, collate_fn=list)
    assert list(loader) == [[0, 1], [2, 3]]


def test_a_row_that_cannot_be_read_fails_where_its_batch_is_due():
    class Broken(Numbers):
        def __getitem__(self, item):
            return {0: 0, 1: 1}[item]

    rows = Broken(4)
    batches = iter(
        BatchLoader(rows, SequentialSampler(rows), batch_size=2, drop_last=True, num_workers=0, collate_fn=list)
    )
    assert next(batches) == [0, 1]
    with pytest.raises(KeyError):
        next(batches)


def test_a_place_that_another_version_saved_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"^trainer\.resume_mode: .*trainer\.default_local_dir"):
        loader_of(6, 2, 0).load_state_dict({"_sampler_iter_state": None, "_num_yielded": 3})


def test_rows_are_loaded_by_other_processes_but_no_more_than_there_are_batches_or_cores():
    processes = {pid for batch in loader_of(8, 2, 64) for _, pid in batch}
    assert os.getpid() not in processes
    assert len(processes) <= len(os.sched_getaffinity(0))
    assert {pid for batch in loader_of(8, 8, 64) for _, pid in batch} == {os.getpid()}


def test_a_stream_that_is_closed_leaves_no_process_behind():
    """Torch reports workers that die with their process as a traceback: they are ended before it exits."""
    loader = loader_of(8, 2, 2)
    stream, before = PromptStream(loader, total_epochs=1, batch_size=4), set(multiprocessing.active_children())
    stream.next_rows()
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == loader.num_workers > 0
    stream.close()
    assert not workers & set(multiprocessing.active_children())
    assert len(list(loader)) == 4, "a later epoch starts others"
    loader.close()
    assert set(multiprocessing.active_children()) <= before


def test_a_sampler_without_a_length_is_refused():
    class Endless(Sampler):
        def __iter__(self):
            return itertools.count()

    with pytest.raises(ValueError, match=r"(?s)data\.sampler\.path.*__len__"):
        loader_of(4, 2, 0, Endless())


def test_a_batch_larger_than_the_data_is_refused_with_the_numbers():
    config = config_of()
    with pytest.raises(ValueError, match=r"^data\.train_batch_size = 4: data\.train_files .*\b3\b"):
        make_dataloader(Numbers(3), config)
    assert [len(batch) for batch in make_dataloader(Numbers(3), config, collate_fn=list, batch_size=2)] == [2, 1]
