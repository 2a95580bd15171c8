"""Dataloaders whose position can be saved and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.config import DataConfig
from verl.utils.dataset.rl_dataset import collate_fn as default_collate_fn
from verl.utils.dataset.sampler import EpochSampler


def make_dataloader(
    dataset: Any,
    config: DataConfig,
    collate_fn: Callable[..., Any] | None = None,
    sampler: Any = None,
    batch_size: int | None = None,
) -> StatefulDataLoader:
    """Training batches of `gen_batch_size` prompts in the sampler's order, incomplete last ones dropped; with
    `batch_size`, all rows in their own order."""
    training = batch_size is None
    size = config.gen_batch_size if batch_size is None else batch_size
    if training and len(dataset) < size:
        raise ValueError(
            f"data.train_batch_size = {size}: data.train_files hold only {len(dataset)} usable prompts."
            f" Set it to {len(dataset)} or less, or give more data."
        )
    return StatefulDataLoader(
        dataset,
        batch_size=size,
        sampler=sampler if training else None,
        num_workers=config.dataloader_num_workers,
        drop_last=training,
        collate_fn=collate_fn or default_collate_fn,
    )


def make_sampler(config: DataConfig, dataset: Any) -> EpochSampler:
    """Shuffled by `data.seed` every epoch, or in order; resumes where it stopped, at the end of an epoch too."""
    return EpochSampler(dataset, config.seed, config.shuffle, batch_size=config.gen_batch_size)
