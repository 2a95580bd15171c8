"""SFTTrainer: supervised fine-tuning, over one rank in this process or several on Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from verl.config import SFTConfig
from verl.protocol import DataProto
from verl.trainer.common.supervised import SupervisedTrainer
from verl.trainer.sft.data import create_sft_dataset, prompt_response_batch
from verl.workers.roles.sft import SFTWorker


class SFTTrainer(SupervisedTrainer[SFTConfig]):
    """A `SupervisedTrainer` of answers: `val/loss` is the mean over all answer tokens of the validation rows."""

    worker_class = SFTWorker

    def dataset(self, is_train: bool) -> Any:
        return create_sft_dataset(self.config.data, self.tokenizer, is_train)

    def collator(self) -> Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]:
        return partial(prompt_response_batch, pad_token_id=self.tokenizer.pad_token_id)

    def counted(self, batch: DataProto) -> dict[str, float]:
        return {"train/learned_tokens": float(batch.batch["response_mask"].sum())}
