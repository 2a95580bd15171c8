"""Roles over an engine whose first rank has no outputs: every phase gives what one rank with the whole model gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from tests.support.engine_cases import assert_close, run_ranks
from tests.support.pipeline_ranks import phases, run_stage
from tests.support.tiny import save_tiny_model, tiny_config

COLUMNS = ("old", "ref", "update", "after", "resumed", "values", "scores")
METRICS = ("update", "critic", "sft", "evaluated", "evaluated again")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    save_tiny_model(folder / "model", num_hidden_layers=1)
    torch.manual_seed(2)
    config = tiny_config(num_labels=1, num_hidden_layers=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "scorer")
    run_ranks(run_stage, folder)
    stages = [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(2)]
    whole = phases(str(folder), str(folder / "whole"))
    dist.destroy_process_group()
    return *stages, whole


def test_results_are_taken_from_the_last_stage_alone(found):
    first, last, whole = found
    assert first["places"] == [(0, False)] * 2
    assert last["places"] == whole["places"] == [(0, True)] * 2
    assert all(not list(first[name].batch.keys() if first[name].batch is not None else ()) for name in COLUMNS)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_those_of_one_rank_with_the_whole_model(found, name):
    _, last, whole = found
    assert_close(dict(last[name].batch.items()), dict(whole[name].batch.items()))


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_those_of_one_rank_with_the_whole_model(found, name):
    _, last, whole = found
    ours, theirs = (each[name].meta_info["metrics"] for each in (last, whole))
    theirs = {key: value for key, value in theirs.items() if "prefix_saving" not in key}  # only fsdp shares prefixes
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(torch.tensor(ours[key]), torch.tensor(value), atol=1e-5, rtol=1e-3, msg=key)


def test_both_stages_rollouts_hold_the_weights_of_both_stages(found):
    first, last, whole = found
    assert_close(first["rollout weights"], whole["rollout weights"])
    assert all(torch.equal(first["rollout weights"][name], value) for name, value in last["rollout weights"].items())


def test_a_checkpoint_of_both_stages_brings_back_what_it_held(found):
    _, last, _ = found
    assert torch.equal(last["resumed"].batch["old_log_probs"], last["after"].batch["old_log_probs"])
    assert last["evaluated again"].meta_info == last["evaluated"].meta_info
