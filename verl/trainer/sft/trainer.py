"""SFTTrainer: supervised fine-tuning, over one rank in this process or several on Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from verl.config import SFTConfig
from verl.protocol import DataProto
from verl.trainer.common.supervised import SupervisedTrainer
from verl.trainer.sft.answers import AnswerCheck
from verl.trainer.sft.data import create_sft_dataset, prompt_response_batch
from verl.trainer.sft.ends import learned_ends
from verl.workers.roles.supervised import SFTWorker


class SFTTrainer(SupervisedTrainer[SFTConfig]):
    """A `SupervisedTrainer` of answers: `val/loss` is the mean over all answer tokens of the validation rows.

    With `data.val_prompt_files` a validation also has the model answer prompts, and scores what it says.
    """

    worker_class = SFTWorker

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.saver.beside_models = learned_ends(self.config, self.tokenizer)
        self._answers = AnswerCheck(self.config, self.tokenizer) if config.data.val_prompt_files else None

    @property
    def validates(self) -> bool:
        return super().validates or self._answers is not None

    def _validate(self) -> dict[str, float]:
        found = super()._validate()
        if self._answers is None or (self.stop_requested.is_set() and self.config.trainer.save_within is not None):
            return found
        return found | self._answers.run(self.worker_group, self.global_steps, self.tracking)

    def dataset(self, is_train: bool) -> Any:
        return create_sft_dataset(self.config.data, self.tokenizer, is_train)

    def collator(self) -> Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]:
        return partial(prompt_response_batch, pad_token_id=self.tokenizer.pad_token_id)

    def counted(self, batch: DataProto) -> dict[str, float]:
        return {"train/learned_tokens": float(batch.batch["response_mask"].sum())}
