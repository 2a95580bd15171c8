"""The training benchmark measures what it says: one schedule of lengths for all systems, variants that are valid."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from _ours_step import base, select_variants, variants
from _training_work import Work
from _trl_step import ForcedEnds, with_lengths
from training_step import comparison, summary

from verl.config import load_config

RAGGED = Work("b", "tiny", prompts=32, n=8, prompt_length=128, mean=256, longest=2048, steps=3)


@pytest.mark.parametrize("step", range(4))
def test_ragged_lengths_have_the_mean_and_the_maximum_they_are_announced_with(step):
    lengths = RAGGED.lengths(step)
    assert lengths.shape == (32, 8)
    assert lengths.mean() == pytest.approx(256, abs=1)
    assert (lengths.min() >= 1, lengths.max()) == (True, 2048)
    assert lengths.std() > 200  # really ragged
    assert (lengths == RAGGED.lengths(step)).all()
    assert (lengths != RAGGED.lengths(step + 1)).any()


def test_forced_ends_give_every_row_exactly_its_length():
    eos, lengths = 1, torch.tensor([1, 3, 2])
    forced = ForcedEnds(lengths, eos)
    rows = torch.full((3, 4), 7)
    found = [0, 0, 0]
    for _ in range(3):
        tokens = forced(rows, torch.randn(3, 9)).softmax(-1).multinomial(1)
        for row, token in enumerate(tokens.flatten().tolist()):
            if token == eos and not found[row]:
                found[row] = rows.shape[1] - 4 + 1
        rows = torch.cat([rows, tokens], dim=1)
    assert found == lengths.tolist()


def test_every_variant_is_a_valid_configuration():
    common = [
        "algorithm.adv_estimator=grpo",
        "data.train_files=a/b",
        "data.train_batch_size=32",
        "data.max_prompt_length=128",
        "data.max_response_length=2048",
        "actor_rollout_ref.model.path=a/b",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
    ]
    by_name = variants(RAGGED, budget=8192, checkpointing=False, compiled=False)
    loaded = {name: load_config(None, [*common, *overrides], check_files=False) for name, overrides in by_name.items()}
    on, off = (loaded[name].actor_rollout_ref for name in ("all on", "everything off"))
    assert (on.model.use_remove_padding, on.actor.use_dynamic_bsz) == (True, True)
    assert (off.model.use_remove_padding, off.actor.use_dynamic_bsz) == (False, False)
    # Fixed rows never exceed the token budget, however long they are.
    assert off.actor.ppo_micro_batch_size_per_gpu * RAGGED.sequence <= 8192
    assert select_variants(by_name, ["remove padding"]).keys() == {"no remove_padding"}
    assert by_name["all on"] == base(RAGGED, 8192, False, False)


def test_a_summary_compares_only_what_was_measured_and_the_last_of_it():
    row = {"case": "a", "shape": "tiny", "phase": "step"}
    ours = {**row, "system": "verl", "variant": "all on"}
    other = {**row, "system": "trl", "variant": "float32", "s": 12.0}
    assert summary([{**ours, "s": 2.0}], "tiny") == []
    failed = {**ours, "note": "cut off"}
    (target,) = summary([{**ours, "s": 9.0}, other, {**ours, "s": 2.0}, failed], "tiny")
    assert (target["value"], target["met"]) == (6.0, True)


def test_repetitions_are_compared_by_their_medians():
    row = {"case": "a", "shape": "tiny", "phase": "step", "note": "n"}
    ours, other = {**row, "system": "verl", "variant": "all on"}, {**row, "system": "trl-vllm", "variant": "float32"}
    rows = [{**ours, "s": seconds} for seconds in (2.0, 9.0, 1.0)] + [{**other, "s": s} for s in (8.0, 6.0, 6.0)]
    adapters = [{**ours, "variant": "all on, LoRA 8", "s": 1.0}, {**other, "variant": "float32, LoRA 8", "s": 4.0}]
    table = {(line["system"], line["variant"]): line for line in comparison([*rows, *adapters, {**ours, "note": "-"}])}
    assert table["trl-vllm", "float32"]["s"] == 6.0
    assert table["trl-vllm", "float32"]["× verl"] == 3.0
    assert table["verl", "all on"]["runs"] == 3
    assert table["trl-vllm", "float32, LoRA 8"]["× verl"] == 4.0


def test_every_request_of_vllm_has_the_length_of_its_row():
    @dataclass
    class Params:
        n: int = 1
        max_tokens: int = 99

    def generate(prompts, sampling_params, use_tqdm):
        return [params.max_tokens for params in sampling_params]

    scheduled = with_lengths(generate, lambda: torch.tensor([3, 5]))
    assert scheduled(["x", "y"], sampling_params=Params(), use_tqdm=False) == [3, 5]
    with pytest.raises(ValueError, match=r"\b3 prompts .*n=1\b.*\b2 lengths"):
        scheduled(["x", "y", "z"], sampling_params=Params(), use_tqdm=False)
