"""One model over several ranks answers what it answers on one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine_cases import fork_ranks
from tests.support.tensor_parallel_ranks import generate, make_rollout, run_rank, weights_of
from tests.support.tiny import save_tiny_model, tiny_config
from verl.inference.models.fused import WeightLayout
from verl.inference.tensor_parallel import TensorParallel
from verl.utils.weight_fingerprint import fingerprints

# Family, changes, ranks per engine, ranks in all: kv heads cut, kv heads shared by two ranks each, two engines beside
# each other, tied and untied heads, a vocabulary that cannot be cut.
CASES = [
    ("qwen2", {"tie_word_embeddings": True}, 2, 2),
    pytest.param("llama", {"vocab_size": 265, "attention_bias": True}, 2, 2, marks=pytest.mark.slow),
    pytest.param("qwen3", {"head_dim": 32}, 4, 4, marks=pytest.mark.slow),
    pytest.param("llama", {}, 2, 4, marks=pytest.mark.slow),
]


def run_ranks(folder: Path, family: str, changes: dict[str, Any], ranks: int, world: int) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork_ranks(run_rank, (world, port, ranks, family, changes, str(folder)), world, run_rank.__module__)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=True) for rank in range(world)]


def alone(folder: Path, family: str, changes: dict[str, Any]) -> dict[str, Any]:
    rollout = make_rollout(f"{folder}/model")
    try:
        found = {"first": generate(rollout)}
        new = weights_of(family, 7, changes)
        for version in (1, 2):
            rollout.begin_update(version, new)
            rollout.load_bucket(new)
            rollout.finish_update(fingerprints(new, torch.float32))
            found[f"updated {version}"] = generate(rollout)
        return found
    finally:
        rollout.close()


@pytest.mark.parametrize(("family", "changes", "ranks", "world"), CASES)
def test_several_ranks_answer_as_one(tmp_path, family, changes, ranks, world):
    save_tiny_model(tmp_path / "model", family, **changes)
    expected = alone(tmp_path, family, changes)
    found = run_ranks(tmp_path, family, changes, ranks, world)
    for rank in range(world):
        leads = rank % ranks == 0
        answers = zip(expected["first"]["responses"].tolist(), expected["first"]["response_mask"].sum(-1), strict=True)
        assert found[rank]["requests"] == ([tokens[:length] for tokens, length in answers] if leads else None)
        for name, columns in expected.items():
            if not leads:
                assert found[rank][name] is None
                continue
            for key in ("responses", "response_mask", "rollout_versions"):
                assert torch.equal(found[rank][name][key], columns[key]), (rank, name, key)
            torch.testing.assert_close(
                found[rank][name]["rollout_log_probs"], columns["rollout_log_probs"], atol=1e-5, rtol=0
            )
        assert found[rank]["rejected"].startswith("WeightMismatchError")
        assert "k_proj" in found[rank]["rejected"]
    assert not torch.equal(expected["first"]["responses"], expected["updated 1"]["responses"])


def test_a_model_that_cannot_be_cut_is_refused_with_the_key():
    for changes in ({"num_attention_heads": 6, "hidden_size": 96}, {"intermediate_size": 130}):
        with pytest.raises(ValueError, match=r"tensor_model_parallel_size"):
            WeightLayout(tiny_config("llama", **changes), TensorParallel(0, 4))
    with pytest.raises(ValueError, match=r"^tensor_model_parallel_size: 2\b.*\b3 key/value heads"):
        WeightLayout(
            tiny_config("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96), TensorParallel(0, 2)
        )


def test_the_parts_of_all_ranks_make_up_every_tensor_once():
    config = tiny_config("qwen2", num_key_value_heads=2)
    for ranks in (2, 4):
        layouts = [WeightLayout(config, TensorParallel(rank, ranks)) for rank in range(ranks)]
        for name, shard in layouts[0].shards().items():
            parts = [layout.shards()[name] for layout in layouts]
            covered = sorted((part.start, part.length) for part in parts if part.counted)
            assert sum(length for _, length in covered) == shard.full, name
            assert covered[0][0] == 0
            assert len({start for start, _ in covered}) == len(covered)
