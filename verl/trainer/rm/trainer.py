"""RMTrainer: a reward model learns from compared answers, over one rank in this process or several on Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from verl.algos.preference import Pairs, loss_and_slopes, preference_metrics, validation_metrics
from verl.config import RMConfig
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.trainer.common.supervised import SupervisedTrainer
from verl.trainer.rm.data import compared_answers, pairs_of
from verl.trainer.rm.padding import padding_token
from verl.utils.conversation_tokens import SCORED_AT_END
from verl.utils.dataset.preference_dataset import PreferenceDataset
from verl.utils.fs import resolve_model_path
from verl.utils.import_utils import load_user_object
from verl.utils.metric import reduce_metrics
from verl.workers.roles.reward_training import SLOPES, TOKENS, RewardTrainingWorker


class RMTrainer(SupervisedTrainer[RMConfig]):
    """A `SupervisedTrainer` of pairs. A step has two passes: all answers are scored, which says how much the loss
    changes with each score; then each answer is learned with that slope. So a pair may be in two micro-batches or on
    two ranks, and an answer of several pairs is learned once.
    """

    worker_class = RewardTrainingWorker
    items = "prompts"

    def __init__(self, config: RMConfig) -> None:
        super().__init__(config)
        model = self.config.model
        hf_config = read_config(resolve_model_path(model.path), model.trust_remote_code, model.override_config)
        if "pad_token_id" in model.override_config and hf_config.pad_token_id is not None:
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(hf_config.pad_token_id)
        else:
            self.tokenizer.pad_token = padding_token(self.tokenizer, hf_config.get_text_config().vocab_size)
            model.override_config["pad_token_id"] = self.tokenizer.pad_token_id
        self.tokenizer.init_kwargs[SCORED_AT_END] = True

    def dataset(self, is_train: bool) -> Any:
        data = self.config.data
        files = data.train_files if is_train else data.val_files
        limit = data.train_max_samples if is_train else data.val_max_samples
        custom = data.custom_cls
        if custom.path is not None and custom.name is not None:
            names = ("data_files", "tokenizer", "config", "max_samples")
            cls = load_user_object(custom.path, custom.name, key="data.custom_cls.path", required_params=names)
            return cls(data_files=files, tokenizer=self.tokenizer, config=data, max_samples=limit)
        return PreferenceDataset(files, self.tokenizer, data, limit, split="train" if is_train else "validation")

    def collator(self) -> Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]:
        return partial(compared_answers, pad_token_id=self.tokenizer.pad_token_id)

    def counted(self, batch: DataProto) -> dict[str, float]:
        return {"train/answers": float(len(batch)), "train/pairs": float(len(pairs_of(batch.batch)))}

    def summary(self, found: Sequence[DataProto]) -> dict[str, float]:
        """Of all pairs at once: some of it is no mean over batches."""
        pairs = Pairs.joined([pairs_of(part.batch) for part in found], [len(part) for part in found])
        scores, lengths = (torch.cat([part.batch[name] for part in found]) for name in ("scores", "answer_tokens"))
        measured = validation_metrics(scores, lengths, pairs, self.config.centering_coef)
        return {f"val/{name}": value for name, value in measured.items()}

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step; every rank gets as many answers and about as many tokens."""
        pairs, answers = pairs_of(batch.batch), len(batch)
        rows = batch.select(batch_keys=TOKENS)
        rows.padding(-answers % self.config.dp_size)
        rows.batch["row"] = torch.arange(len(rows))
        rows = self.dealt(rows) if self.config.dp_size > 1 else rows
        order = rows.batch["row"]
        scores = torch.zeros(len(rows)).index_copy(0, order, self.worker_group.evaluate(rows).batch["scores"])
        loss, slopes = loss_and_slopes(scores[:answers], pairs, self.config.centering_coef)
        rows.batch[SLOPES] = torch.cat([slopes, torch.zeros(len(rows) - answers)])[order]
        rows.meta_info["pairs"] = float((pairs.weight > 0).sum())
        learned = reduce_metrics(self.worker_group.train_batch(rows).meta_info["metrics"])
        found = {"loss": loss, **preference_metrics(scores[:answers], pairs)}
        return {f"train/{name}": value for name, value in found.items()} | learned
