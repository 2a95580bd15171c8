"""RMTrainer: a reward model learns from compared answers, over one rank in this process or several on Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from verl.algos.preference import Pairs, preference_loss, preference_metrics, score_slopes, validation_metrics
from verl.config import RMConfig
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.trainer.common.supervised import SupervisedTrainer
from verl.trainer.rm.data import PROMPT, compared_answers, pairs_of
from verl.trainer.rm.dealing import dealt_to_ranks, scores_of_each, whole_prompts
from verl.trainer.rm.padding import padding_token
from verl.trainer.rm.preference_dataset import PreferenceDataset
from verl.utils.fs import resolve_model_path
from verl.utils.import_utils import load_user_object
from verl.utils.metric import reduce_metrics
from verl.utils.scoring_tokens import SCORED_AT_END
from verl.workers.engine.common.micro_batches import TOGETHER
from verl.workers.roles.supervised import COMPARED, ROW, SLOPES, TOKENS, RewardTrainingWorker, micro_batching


class RMTrainer(SupervisedTrainer[RMConfig]):
    """A `SupervisedTrainer` of pairs. All answers to a prompt are learned in one micro-batch, each once. A prompt that
    does not fit is torn (`dealing`): its answers are scored first, which says how much the loss changes with each
    score, and learned with that slope, each in any micro-batch and on any rank.
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
            self.tokenizer.pad_token = padding_token(
                self.tokenizer,
                hf_config.get_text_config().vocab_size,
                self.config.data.apply_chat_template_kwargs,
            )
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
        """One optimizer step; every rank gets whole prompts, where they fit, and about as many tokens."""
        pairs, places = pairs_of(batch.batch), torch.arange(len(batch))
        lengths, prompts = batch.batch["attention_mask"].sum(dim=1), batch.batch[PROMPT]
        micro = micro_batching(self.config).shared_by(self.config.sharing)
        whole = whole_prompts(prompts, lengths, micro, self.config.dp_size)
        rows = batch.select(batch_keys=TOKENS)
        rows.meta_info["weight"] = float(pairs.weight.sum())
        rows.batch[ROW] = places
        rows.batch[TOGETHER] = torch.where(whole, prompts, len(batch) + places)
        rows.batch[COMPARED] = batch.batch[COMPARED].where(whole[:, None, None], -1.0)
        rows.batch[SLOPES] = self._slopes(batch, pairs, ~whole)
        rows = dealt_to_ranks(rows, self.config.dp_size)
        learned = self.worker_group.train_batch(rows)
        scores = torch.zeros(len(rows)).index_copy(0, rows.batch[ROW], learned.batch["scores"])[: len(batch)]
        loss = float(preference_loss(scores.double(), pairs, self.config.centering_coef))
        found = {"loss": loss, **preference_metrics(scores, pairs)}
        return {f"train/{name}": value for name, value in found.items()} | reduce_metrics(learned.meta_info["metrics"])

    def _slopes(self, batch: DataProto, pairs: Pairs, torn: torch.Tensor) -> torch.Tensor:
        """Of answers to torn prompts [answers], which are scored for it; 0 of others."""
        slopes, (rows,) = torch.zeros(len(batch)), torn.nonzero(as_tuple=True)
        if len(rows):
            columns = {name: batch.batch[name][rows] for name in TOKENS}
            found = scores_of_each(self.worker_group.evaluate, columns, self.config.dp_size)
            scores = slopes.index_copy(0, rows, found)
            weight = float(pairs.weight.sum())
            slopes = score_slopes(scores, pairs[torn[pairs.chosen]], self.config.centering_coef, weight)
        return slopes
