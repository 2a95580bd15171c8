"""Layers are dealt out to the stages of a pipeline as Megatron-Core does."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config import as_config
from verl.config.engine import MegatronConfig
from verl.planning.shapes import MegatronLayout, stage_layers


def _counts(*args: Any, **kwargs: Any) -> list[list[int]]:
    return [[len(chunk) for chunk in stage] for stage in stage_layers(*args, **kwargs)]


def test_stages_have_neighbouring_layers() -> None:
    assert stage_layers(8, 2) == [[range(0, 4)], [range(4, 8)]]
    assert stage_layers(3, 1) == [[range(0, 3)]]


def test_chunks_of_stages_take_turns() -> None:
    assert stage_layers(8, 2, 2) == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]


def test_first_and_last_stage_may_have_fewer() -> None:
    assert _counts(7, 3, first=2, last=1) == [[2], [4], [1]]
    assert _counts(7, 2, first=3, last=4) == [[3], [4]]
    assert stage_layers(10, 3, 2, last=2) == [
        [range(0, 2), range(5, 7)],
        [range(2, 4), range(7, 9)],
        [range(4, 5), range(9, 10)],
    ]


def test_embedding_and_loss_may_count_as_layers() -> None:
    assert _counts(14, 4, embedding_counts=True, loss_counts=True) == [[3], [4], [4], [3]]
    assert _counts(14, 4, 2, embedding_counts=True, loss_counts=True) == [[1, 2], [2, 2], [2, 2], [2, 1]]


def test_the_plan_counts_them_as_configured() -> None:
    keys = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    settings = {"pipeline_model_parallel_size": 4, "override_transformer_config": dict.fromkeys(keys, True)}
    config = as_config(MegatronConfig, settings, at="actor_rollout_ref.actor.megatron_config")
    layout = MegatronLayout.from_config(config, world=4)
    assert [len(chunk) for stage in layout.stages(14) for chunk in stage] == [3, 4, 4, 3]


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "options", "message"),
    [
        (7, 2, None, {}, r"^pipeline_model_parallel_size: 2 .* one of \[1, 7\]"),
        (24, 2, None, {"embedding_counts": True}, r"2 .* 25 layers \(24 and the embedding\)\. .* \[1, 5, 25\]"),
        (7, 2, 3, {"loss_counts": True}, r"3 .* the 4 layers of a stage \(including the loss\)"),
        (8, 2, 3, {}, "virtual_pipeline_model_parallel_size: 3 .* 4 layers"),
        (8, 1, 2, {}, "virtual_pipeline_model_parallel_size: 2 .*pipeline_model_parallel_size is 1"),
        (8, 4, None, {"first": 1}, "num_layers_in_first_pipeline_stage .* leave 7 of 8 layers"),
        (8, 2, None, {"first": 1, "last": 1}, "num_layers_in_last_pipeline_stage: 1 and 1 leave 6 of 8 layers"),
        (8, 2, None, {"first": 4, "loss_counts": True}, "account_for_embedding_in_pipeline_split"),
    ],
)
def test_layers_that_cannot_be_divided_are_rejected_by_key(
    layers: int, pp: int, vpp: int | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stage_layers(layers, pp, vpp, **options)
