"""SFTTrainer: supervised fine-tuning. GenerativeValidation: generate and score responses during validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl.config import SFTConfig, SFTDataConfig
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.trainer.common.dumps import ResponseText
from verl.trainer.common.recorder import Recorder
from verl.trainer.evaluation import reward_rules, score_samples
from verl.trainer.ppo.recorded_rows import RowOptions, record_validation
from verl.trainer.ppo.validator import sample_correctness, sample_metrics
from verl.trainer.supervised.row_record import ValidationRecord
from verl.trainer.supervised.trainer import SupervisedTrainer, custom_dataset
from verl.utils.dataset.chat import PromptEncoder
from verl.utils.dataset.problems import DataError, chat_rule, raise_problems
from verl.utils.dataset.rows import Rows, find_files, ground_truth_of, value_at
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset, SFTDataset
from verl.utils.dataset.tokens import encode_prompts
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path
from verl.utils.model import compute_position_id_with_mask
from verl.utils.reward_score.registry import UNKNOWN_SOURCE
from verl.utils.tracking import Tracking
from verl.workers.reward_manager.scorer import ERROR_COLUMN, Sample
from verl.workers.roles.supervised import SFTWorker
from verl.workers.rollout.prompts import prompt_rows, response_end_tokens

# Maximum number of generated responses on the console; trackers receive `trainer.log_val_generations` of them.
_MAX_ON_CONSOLE = 3


class SFTTrainer(SupervisedTrainer[SFTConfig]):
    """Supervised fine-tuning. `val/loss` is the mean over all response tokens of the validation rows.

    With `data.val_prompt_files`, a validation also generates and scores responses.
    """

    worker_class = SFTWorker
    program = "sft"

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.saver.model_files = generation_config_file(self.config, self.tokenizer)
        has_prompts = bool(config.data.val_prompt_files)
        self._generative_validation = GenerativeValidation(self.config, self.tokenizer) if has_prompts else None

    @property
    def validates(self) -> bool:
        """Whether the run has validation rows or prompts."""
        return super().validates or self._generative_validation is not None

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        # A requested stop leaves only `trainer.save_within` seconds for the save: they are not spent on generation.
        must_save_now = self.stop_requested.is_set() and self.config.trainer.save_within is not None
        if self._generative_validation is None or must_save_now:
            return metrics
        return metrics | self._generative_validation.run(
            self.worker_group, self.global_steps, self.tracking, self.recorder
        )

    def create_dataset(self, is_train: bool) -> Any:
        return create_sft_dataset(self.config.data, self.tokenizer, is_train)

    def collate_fn(self) -> Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]:
        return partial(prompt_response_batch, pad_token_id=self.tokenizer.pad_token_id)

    def batch_metrics(self, batch: DataProto) -> dict[str, float]:
        return {"train/learned_tokens": float(batch.batch["response_mask"].sum())}

    def record_rows(self, batch: DataProto, output: DataProto) -> None:
        if self.row_record is not None:
            self.row_record.rows(batch, output.batch["log_probs"], self.global_steps)

    def record_validation(self, record: ValidationRecord, batch: DataProto, result: DataProto) -> None:
        if self._generative_validation is None:  # otherwise the generated responses are recorded
            record.add_rows(batch, result)


def create_sft_dataset(config: SFTDataConfig, tokenizer: Any, is_train: bool) -> Any:
    """Return the dataset of `data.train_files` or `data.val_files`: an instance of `data.custom_cls`, if it is set,
    otherwise of MultiTurnSFTDataset or SFTDataset."""
    files = config.train_files if is_train else config.val_files
    limit = config.train_max_samples if is_train else config.val_max_samples
    if (dataset := custom_dataset(config, tokenizer, files, limit)) is not None:
        return dataset
    cls: type[SFTDataset] = MultiTurnSFTDataset if config.multiturn else SFTDataset
    return cls(files, tokenizer, config.to_dict(), max_samples=limit, split="train" if is_train else "validation")


def prompt_response_batch(rows: Sequence[Mapping[str, torch.Tensor]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Collate rows to the columns of a rollout: `prompts` left-padded, `responses` right-padded, masks, positions.

    A row is split into prompt and response at its first token with loss, but not before its second token: the first
    token is not predicted. `response_mask` marks response tokens whose `loss_mask` is not 0. If `loss_mask` is
    floating-point, `loss_weights` contains its values.
    """
    splits = [_first_loss_token(row["loss_mask"]) for row in rows]
    prompts, responses = _split_and_pad([row["input_ids"] for row in rows], splits, pad_token_id)
    attention_mask = torch.cat(_split_and_pad([row["attention_mask"] for row in rows], splits, 0), dim=1)
    masks = [row["loss_mask"] for row in rows]
    loss_weights: dict[str, torch.Tensor] = {}
    if any(mask.is_floating_point() for mask in masks):
        loss_weights["loss_weights"] = _split_and_pad([mask.float() for mask in masks], splits, 0)[1]
        masks = [(mask != 0).long() for mask in masks]
    return loss_weights | {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        "response_mask": _split_and_pad(masks, splits, 0)[1],
    }


def _first_loss_token(loss_mask: torch.Tensor) -> int:
    """Return the position at which the response begins (see `prompt_response_batch`); the length of the row if no token
    has loss."""
    marked = loss_mask.nonzero()
    return max(1, int(marked[0])) if len(marked) else len(loss_mask)


def _split_and_pad(
    sequences: Sequence[torch.Tensor], splits: Sequence[int], padding_value: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split each sequence at its position in `splits`; return the first parts, left-padded, and the others,
    right-padded."""
    before = [sequence[:split] for sequence, split in zip(sequences, splits, strict=True)]
    after = [sequence[split:] for sequence, split in zip(sequences, splits, strict=True)]
    return (
        pad_sequence(before, batch_first=True, padding_value=padding_value, padding_side="left"),
        pad_sequence(after, batch_first=True, padding_value=padding_value),
    )


def generation_config_file(config: SFTConfig, tokenizer: object) -> dict[str, bytes]:
    """Return the file to export with the model, {"generation_config.json": content}, with all end tokens; {} if the
    file of the initial model has all of them.

    The end token of a base model differs from that of chat responses: an engine that reads end tokens only from this
    file would continue after the end of a response.
    """
    from transformers import GenerationConfig

    model = config.model
    folder = resolve_model_path(model.path)
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    end_tokens = find_end_tokens(folder, hf_config, tokenizer, config.data.apply_chat_template_kwargs)
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # the model has no generation_config.json
        generation = GenerationConfig.from_model_config(hf_config)
    old_ids = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    ids = [token for token in dict.fromkeys([*old_ids, *sorted(end_tokens.ids)]) if token is not None]
    if ids == old_ids:
        return {}
    generation.eos_token_id = ids
    return {"generation_config.json": generation.to_json_string().encode()}


class GenerativeValidation:
    """Generates responses to the prompts of `data.val_prompt_files` (rows as for `main_ppo`) and scores them."""

    def __init__(self, config: SFTConfig, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        data = config.data
        self._rows = rows = Rows(find_files(data.val_prompt_files))
        raise_problems(rows, [chat_rule(data.prompt_key, "data.prompt_key"), *reward_rules(config)])
        self._count = len(rows) if data.val_max_samples < 0 else min(data.val_max_samples, len(rows))
        encoder = PromptEncoder(tokenizer, data.apply_chat_template_kwargs)
        self._prompts = encode_prompts(rows, self._count, data.prompt_key, encoder)
        self._check_lengths()
        self._end_tokens = response_end_tokens(config.model, config.rollout, tokenizer, data.apply_chat_template_kwargs)

    def run(self, worker_group: Any, step: int, tracking: Tracking, recorder: Recorder) -> dict[str, float]:
        """Generate and score responses with the current weights of `worker_group`; return the same metrics as the
        validation of PPO.

        `trainer.log_val_generations` samples are logged, all are recorded.
        """
        try:
            worker_group.resume_rollout(step)
            output = worker_group.generate(self._batch())
        finally:
            worker_group.release_rollout()
        texts = self._tokenizer.batch_decode(list(output.non_tensor_batch["response_ids"]), skip_special_tokens=True)
        val_n = self._config.data.val_n
        samples = [self._sample(index // val_n, text) for index, text in enumerate(texts)]
        scores = score_samples(self._config, samples)
        self._log_samples(texts, [score.value for score in scores], step, tracking)
        names = dict.fromkeys(name for score in scores for name in score.extra)
        columns: dict[str, list[Any]] = {name: [score.extra.get(name) for score in scores] for name in names}
        uids = [self._prompts.uid(index // val_n) for index in range(len(texts))]
        columns |= {"uid": uids, "data_source": [sample.data_source for sample in samples]}
        columns[ERROR_COLUMN] = [score.kind for score in scores]
        columns["reward"] = [score.value for score in scores]
        recorded = columns | {
            "response_text": [ResponseText(*pair) for pair in zip(self._prompt_texts, texts, strict=True)],
            "gts": [sample.ground_truth for sample in samples],
            "sample_index": [index % val_n for index in range(len(texts))],
            "length": [len(ids) for ids in output.non_tensor_batch["response_ids"]],
            "correct": sample_correctness(columns, scores_are_continuous=False),
        }
        settings = recorder.settings
        options = RowOptions(None, recorder.redaction, settings.texts, int(settings.max_mb_per_step * 1e6))
        recorder.submit(partial(record_validation, recorded, step, options), step)
        return sample_metrics(columns, scores_are_continuous=False)

    @cached_property
    def _prompt_texts(self) -> list[str]:
        """The prompt of every response, as text."""
        rows = [row for row in range(self._count) for _ in range(self._config.data.val_n)]
        return self._tokenizer.batch_decode([self._prompts.tokens[row] for row in rows], skip_special_tokens=True)

    def _batch(self) -> DataProto:
        """Return `val_n` rows per prompt. Their sampling noise depends on the prompt and the sample index only."""
        rows = range(self._count)
        prompts, uids = [self._prompts.tokens[row] for row in rows], [self._prompts.uid(row) for row in rows]
        return prompt_rows(prompts, uids, self._config.data.val_n, {"eos_token_id": self._end_tokens})

    def _sample(self, row_index: int, text: str) -> Sample:
        """Return the input of the reward function for a response to the prompt of a row."""
        row = self._rows[row_index]
        source = value_at(row, self._config.data.reward_fn_key) or UNKNOWN_SOURCE
        truth = ground_truth_of(row, self._config.data.ground_truth_key)
        return Sample(str(source), text, truth, dict(row.get("extra_info") or {}))

    def _log_samples(self, texts: list[str], scores: list[float], step: int, tracking: Tracking) -> None:
        n, count = self._config.data.val_n, self._config.trainer.log_val_generations
        # The same seed in every validation: the same prompts can be compared between steps.
        logged = np.random.default_rng(self._config.data.seed).permutation(len(texts))[:count]
        prompts = [self._tokenizer.decode(self._prompts.tokens[int(index) // n]) for index in logged]
        samples = [(prompt, texts[index], scores[index]) for prompt, index in zip(prompts, logged, strict=True)]
        if samples:
            tracking.log_generations(samples, step, on_console=min(_MAX_ON_CONSOLE, count))

    def _check_lengths(self) -> None:
        limit, lengths = self._config.data.max_prompt_length, self._prompts.tokens.lengths
        too_long = np.flatnonzero(lengths > limit)
        if len(too_long):
            first, others = int(too_long[0]), len(too_long) - 1
            more = f" (and {others} more)" if others else ""
            raise DataError(
                [
                    f"{self._rows.where(first)}{more}: the prompt has {lengths[first]} tokens, more than"
                    f" data.max_prompt_length = {limit}. Raise it to {lengths.max()} or more."
                ]
            )
