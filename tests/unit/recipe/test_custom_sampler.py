"""The sampler templates: no prompt twice in a batch, weights that work, a curriculum that learns and is resumed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_tokenizer
from tests.support.training_harness import make_task, overrides, run_training
from verl import DataProto
from verl.config import DataConfig, as_config
from verl.trainer.main_ppo import create_rl_sampler
from verl.trainer.ppo.prompts import PromptStream, make_dataloader
from verl.utils.dataset.rl_dataset import RLHFDataset

FILE = str(Path(__file__).parents[3] / "recipe" / "custom" / "sampler.py")
SOURCES = ["openai/gsm8k", "lighteval/MATH"]


def set_up(folder, name, rows=12, batch_size=4):
    """Dataset, configuration and the sampler it names."""
    made = [{"prompt": f"number {i}", "data_source": SOURCES[i % 2]} for i in range(rows)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    config = as_config(
        DataConfig,
        {
            "train_batch_size": batch_size,
            "gen_batch_size": batch_size,
            "sampler": {"path": FILE, "name": name},
            "seed": 5,
        },
    )
    data = RLHFDataset(str(folder / "a.jsonl"), tiny_tokenizer(), config)
    return data, config, create_rl_sampler(config, data)


def scored(batch, right):
    """What training shows the sampler: two answers per prompt; `right` says which prompts were solved."""
    uids = np.repeat(batch["uid"], 2)
    scores = torch.zeros(len(uids), 3)
    scores[:, -1] = torch.tensor([float(right(int(index))) for index in np.repeat(batch["index"], 2)])
    return DataProto.from_dict({"token_level_scores": scores, "response_mask": torch.ones(scores.shape)}, {"uid": uids})


@pytest.mark.parametrize("name", ["WeightedSources", "SometimesSolved"])
def test_no_batch_has_a_prompt_twice_and_an_epoch_is_as_long_as_the_data(tmp_path, name):
    _, _, sampler = set_up(tmp_path, name, rows=14)
    assert len(sampler) == 12
    for _ in range(3):
        rows = list(sampler)
        assert len(rows) == 12
        assert all(len(set(rows[first : first + 4])) == 4 for first in (0, 4, 8))


def test_sources_are_drawn_in_proportion_to_their_weights(tmp_path):
    _, _, sampler = set_up(tmp_path, "WeightedSources", rows=12, batch_size=1)
    drawn = list(itertools.chain.from_iterable(iter(sampler) for _ in range(100)))
    share = np.mean([row % 2 for row in drawn])  # MATH has three times the weight
    assert abs(share - 0.75) < 0.04


def test_prompts_that_are_always_solved_or_never_make_way_for_the_others(tmp_path):
    data, config, sampler = set_up(tmp_path, "SometimesSolved")
    loader = make_dataloader(data, config, sampler=sampler)
    for epoch in range(6):
        right = {0, 1, 2, 3} | (set(range(8, 12)) if epoch % 2 else set())  # 4-7 never, 8-11 every other time
        for batch in loader:
            PromptStream(loader, 1, 4).update_sampler(scored(batch, right.__contains__))
    counts = np.zeros(12)
    for _ in range(50):
        for batch in loader:
            counts[batch["index"].astype(int)] += 1
    assert counts[8:].min() > counts[:8].max()
    assert counts.min() > 0


@pytest.mark.parametrize("name", ["WeightedSources", "SometimesSolved"])
def test_a_restored_sampler_draws_what_the_uninterrupted_one_would(tmp_path, name):
    def run(loader, batches):
        seen = []
        epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
        for batch in itertools.islice(epochs, batches):
            seen.append(batch["index"].tolist())
            PromptStream(loader, 1, 4).update_sampler(scored(batch, lambda index: index % 3 == 0))
        return seen

    def loader():
        data, config, sampler = set_up(tmp_path, name)
        return make_dataloader(data, config, sampler=sampler)

    whole = run(loader(), 9)
    first, second = loader(), loader()
    seen = run(first, 5)
    second.load_state_dict(first.state_dict())
    assert seen + run(second, 4) == whole


def test_training_tells_the_curriculum_of_every_batch(tmp_path):
    task = make_task(tmp_path, rows=16)
    sampler = [f"data.sampler.path={FILE}", "data.sampler.name=SometimesSolved"]
    trainer = run_training(overrides(task, tmp_path, "algorithm=grpo", "actor_rollout_ref.rollout.n=2", *sampler))
    state = trainer.train_dataloader.sampler.state_dict()
    assert state["batches"] == 2
    assert 8 <= (state["solved"] != 0.5).sum() <= 16


def test_an_answer_of_several_rows_is_solved_or_not_once(tmp_path):
    """Both answers are right, and one has two rows: all is solved, not two thirds. The estimate moves half way."""
    data, _, sampler = set_up(tmp_path, "SometimesSolved")
    scores = torch.tensor([[0.0], [1.0], [1.0]])
    objects = {"uid": np.array([data.uids()[0]] * 3, dtype=object), "trajectory": np.array([*"aab"], dtype=object)}
    sampler.update(DataProto.from_dict({"token_level_scores": scores, "response_mask": torch.ones(3, 1)}, objects))
    assert sampler.state_dict()["solved"][0] == 0.75
