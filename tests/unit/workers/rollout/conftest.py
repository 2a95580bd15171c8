"""Tiny models on disk, and rollout engines that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny import save_tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.protocol import DataProto
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.embedded_rollout import EmbeddedRollout


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 100k parameters; some of its responses end with an end-of-sequence token."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["hf", "native"])
def engine_name(request: pytest.FixtureRequest) -> str:
    """Runs the test on every embedded engine: all must satisfy the contract of a rollout."""
    return request.param


@pytest.fixture
def start(model_path: Path, engine_name: str) -> Iterator[Callable[..., EmbeddedRollout]]:
    """Start an engine; keywords are configuration keys."""
    started: list[EmbeddedRollout] = []

    def start_engine(path: Path = model_path, **keys) -> EmbeddedRollout:
        model = as_config(ModelConfig, {"path": str(path)}, "actor_rollout_ref.model")
        config = as_config(RolloutConfig, {"name": engine_name, "max_new_tokens": 24, **keys})
        started.append(get_rollout_class(engine_name)(str(path), model, config))
        return started[-1]

    yield start_engine
    for engine in started:
        engine.close()


@pytest.fixture
def make_prompts() -> Callable[..., DataProto]:
    """Left-padded prompts of different lengths."""

    def make(rows: int = 8, width: int = 16, seed: int = 0, step: int = 3, **meta) -> DataProto:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 13, (rows,), generator=generator)
        ids = torch.randint(5, 264, (rows, 12), generator=generator)
        ids = torch.nn.functional.pad(ids, (width - 12, 0))
        mask = (torch.arange(width) >= width - lengths.unsqueeze(1)).long()
        uids = np.array([f"prompt-{seed}-{row}" for row in range(rows)], dtype=object)
        return DataProto.from_dict(
            {
                "input_ids": ids * mask,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(dim=-1) - 1).clamp(min=0),
            },
            {"uid": uids},
            {"step": step, "seed": 5, **meta},
        )

    return make
