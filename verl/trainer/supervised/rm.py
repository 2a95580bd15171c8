"""RMTrainer: train a reward model on pairs of chosen and rejected responses.

A pair is trained in one pass if both responses are in the same micro-batch. Therefore all responses to a prompt are in
one micro-batch of one rank. If they do not fit, the prompt is split: its responses are distributed freely, another pass
computes their scores, and each response is trained with the gradient of the loss with respect to its score.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from verl.algos.preference import Pairs, preference_loss, preference_metrics, score_gradients, validation_metrics
from verl.config import RMConfig
from verl.config.rm import RMDataConfig
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.trainer.supervised.preference_dataset import PreferenceDataset
from verl.trainer.supervised.row_record import ValidationRecord
from verl.trainer.supervised.trainer import SupervisedTrainer, custom_dataset
from verl.utils.balancing import get_seqlen_balanced_partitions
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path
from verl.utils.metric import reduce_metrics
from verl.utils.scoring_tokens import SCORED_AT_END
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.micro_batches import SET_COLUMN
from verl.workers.roles.supervised import (
    GRADIENT_COLUMN,
    INDEX_COLUMN,
    PAIRS_COLUMN,
    TOKENS,
    RewardTrainingWorker,
    micro_batching,
)

logger = logging.getLogger(__name__)

PROMPT = "prompt"
"""Column [responses]: index of the response's prompt in the batch."""

# A scoring pass costs a third of a training pass.
_COST_WITH_SCORING = 4 / 3


class RMTrainer(SupervisedTrainer[RMConfig]):
    """Trains a reward model. `data.train_batch_size` is a number of prompts, each with all its pairs."""

    worker_class = RewardTrainingWorker
    program = "rm"
    row_name = "prompts"

    def __init__(self, config: RMConfig) -> None:
        super().__init__(config)
        model = self.config.model
        hf_config = read_config(resolve_model_path(model.path), model.trust_remote_code, model.override_config)
        prepare_tokenizer(self.config, hf_config, self.tokenizer)

    def create_dataset(self, is_train: bool) -> Any:
        return create_rm_dataset(self.config.data, self.tokenizer, is_train)

    def collate_fn(self) -> Callable[[Sequence[Any]], Mapping[str, torch.Tensor]]:
        return partial(collate_comparisons, pad_token_id=self.tokenizer.pad_token_id)

    def batch_metrics(self, batch: DataProto) -> dict[str, float]:
        return {"train/answers": float(len(batch)), "train/pairs": float(len(batch_pairs(batch.batch)))}

    def validation_metrics(self, results: Sequence[DataProto]) -> dict[str, float]:
        """Return metrics over all pairs of the validation: some metrics are not means over batches."""
        pairs = Pairs.concat([batch_pairs(part.batch) for part in results], [len(part) for part in results])
        scores, lengths = (torch.cat([part.batch[name] for part in results]) for name in ("scores", "answer_tokens"))
        metrics = validation_metrics(scores, lengths, pairs, self.config.centering_coef)
        return {f"val/{name}": value for name, value in metrics.items()}

    def record_validation(self, record: ValidationRecord, batch: DataProto, result: DataProto) -> None:
        record.add_pairs(batch, batch_pairs(result.batch), result.batch["scores"])

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        """Take one optimizer step. Every rank gets whole prompts if possible, and about equally many tokens."""
        pairs, places = batch_pairs(batch.batch), torch.arange(len(batch))
        lengths, prompts = batch.batch["attention_mask"].sum(dim=1), batch.batch[PROMPT]
        micro = micro_batching(self.config).scaled_by(self.config.ranks_per_sequence)
        whole = whole_prompts(prompts, lengths, micro, self.config.dp_size)
        rows = batch.select(batch_keys=TOKENS)
        rows.meta_info["weight"] = float(pairs.weight.sum())
        rows.batch[INDEX_COLUMN] = places
        rows.batch[SET_COLUMN] = torch.where(whole, prompts, len(batch) + places)
        rows.batch[PAIRS_COLUMN] = batch.batch[PAIRS_COLUMN].where(whole[:, None, None], -1.0)
        rows.batch[GRADIENT_COLUMN] = self._score_gradients(batch, pairs, ~whole)
        rows = distribute_to_ranks(rows, self.config.dp_size)
        output = self.worker_group.train_batch(rows)
        scores = torch.zeros(len(rows)).index_copy(0, rows.batch[INDEX_COLUMN], output.batch["scores"])[: len(batch)]
        loss = float(preference_loss(scores.double(), pairs, self.config.centering_coef))
        metrics = {"loss": loss, **preference_metrics(scores, pairs)}
        if self.row_record is not None:
            self.row_record.pairs(batch, pairs, scores, self.config.centering_coef, self.global_steps)
        return {f"train/{name}": value for name, value in metrics.items()} | reduce_metrics(output.meta_info["metrics"])

    def _score_gradients(self, batch: DataProto, pairs: Pairs, is_split: torch.Tensor) -> torch.Tensor:
        """Score the responses of split prompts; return the gradient of the loss with respect to their scores, and 0 for
        other responses: [responses]."""
        gradients, (rows,) = torch.zeros(len(batch)), is_split.nonzero(as_tuple=True)
        if len(rows):
            columns = {name: batch.batch[name][rows] for name in TOKENS}
            split_scores = score_rows(self.worker_group.evaluate, columns, self.config.dp_size)
            scores = gradients.index_copy(0, rows, split_scores)
            weight = float(pairs.weight.sum())
            gradients = score_gradients(scores, pairs[is_split[pairs.chosen]], self.config.centering_coef, weight)
        return gradients


def prepare_tokenizer(config: RMConfig, hf_config: Any, tokenizer: Any) -> None:
    """Set the padding token, in the tokenizer and in `model.override_config`; record that scores are read at the end.

    Raises ValueError if the vocabulary of the model has no token for it.
    """
    model = config.model
    if "pad_token_id" in model.override_config and hf_config.pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(hf_config.pad_token_id)
    else:
        vocab_size = hf_config.get_text_config().vocab_size
        tokenizer.pad_token = padding_token(tokenizer, vocab_size, config.data.apply_chat_template_kwargs)
        model.override_config["pad_token_id"] = tokenizer.pad_token_id
    tokenizer.init_kwargs[SCORED_AT_END] = True


def create_rm_dataset(config: RMDataConfig, tokenizer: Any, is_train: bool) -> Any:
    """Return the dataset of `data.train_files` or `data.val_files`: of `data.custom_cls`, or a PreferenceDataset."""
    files = config.train_files if is_train else config.val_files
    limit = config.train_max_samples if is_train else config.val_max_samples
    if (dataset := custom_dataset(config, tokenizer, files, limit)) is not None:
        return dataset
    return PreferenceDataset(files, tokenizer, config, limit, split="train" if is_train else "validation")


# -------------------------------------------------------------------- batches


def collate_comparisons(items: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Collate items of a `PreferenceDataset` to a right-padded row per response. `PAIRS_COLUMN` contains the pairs in
    which the response was chosen; `answer_tokens` [responses] is the number of tokens without the prompt."""
    responses = [ids for item in items for ids in item["answers"]]
    mask = pad_sequence([torch.ones_like(ids) for ids in responses], batch_first=True)
    return {
        "input_ids": pad_sequence(responses, batch_first=True, padding_value=pad_token_id),
        "attention_mask": mask,
        "answer_tokens": torch.tensor([tokens for item in items for tokens in item["answer_tokens"]]),
        PROMPT: torch.tensor([number for number, item in enumerate(items) for _ in item["answers"]]),
        PAIRS_COLUMN: _pairs_by_chosen(items, len(responses)),
    }


def batch_pairs(columns: Mapping[str, torch.Tensor]) -> Pairs:
    """Return the pairs of a batch of `collate_comparisons`, whose rows are in the original order."""
    compared = columns[PAIRS_COLUMN]
    chosen, place = (compared[..., 0] >= 0).nonzero(as_tuple=True)
    rejected, *numbers = compared[chosen, place].unbind(dim=1)
    return Pairs(chosen, rejected.long(), *numbers)


def _pairs_by_chosen(items: Sequence[Mapping[str, Any]], responses: int) -> torch.Tensor:
    """Return the column `PAIRS_COLUMN`: [responses, max. pairs per response, 4], filled with -1."""
    by_chosen: list[list[list[float]]] = [[] for _ in range(responses)]
    first = 0
    for item in items:
        for chosen, rejected, *numbers in item["pairs"].tolist():
            by_chosen[first + int(chosen)].append([first + rejected, *numbers])
        first += len(item["answers"])
    compared = torch.full((responses, max(map(len, by_chosen)), 4), -1.0, dtype=torch.float64)
    for row, pairs in enumerate(by_chosen):
        if pairs:
            compared[row, : len(pairs)] = torch.tensor(pairs, dtype=torch.float64)
    return compared


# -------------------------------------------------------------------- distribution to ranks


def whole_prompts(prompts: torch.Tensor, lengths: torch.Tensor, micro: MicroBatching, ranks: int) -> torch.Tensor:
    """Return for each response whether all responses to its prompt are trained in one pass: bool [responses].

    `prompts`, `lengths` [responses]: prompt index and number of tokens of each response. `micro`: size of a
    micro-batch. A prompt is also split if the other ranks would wait for it longer than a scoring pass takes.
    """
    tokens = torch.zeros(int(prompts.max()) + 1, dtype=lengths.dtype).index_add(0, prompts, lengths)
    if ranks > 1:
        whole = tokens * ranks <= _COST_WITH_SCORING * tokens.sum()
    else:
        whole = torch.ones_like(tokens, dtype=torch.bool)
    if micro.max_tokens is not None:
        whole &= tokens <= micro.max_tokens
    elif micro.size is not None:
        whole &= prompts.bincount() <= micro.size
    return whole[prompts]


def score_rows(
    evaluate: Callable[[DataProto], DataProto], tokens: Mapping[str, torch.Tensor], ranks: int
) -> torch.Tensor:
    """Return the scores [responses] of rows, which are balanced over the ranks. `tokens`: columns of the rows.

    `evaluate` returns the columns `scores` and `INDEX_COLUMN`.
    """
    places = torch.arange(len(tokens["input_ids"]))
    rows = DataProto.from_dict({**tokens, INDEX_COLUMN: places, SET_COLUMN: places})
    output = evaluate(distribute_to_ranks(rows, ranks))
    return torch.zeros(len(output)).index_copy(0, output.batch[INDEX_COLUMN], output.batch["scores"])[: len(places)]


def distribute_to_ranks(rows: DataProto, ranks: int) -> DataProto:
    """Reorder the rows so that every rank gets equally many rows, whole sets (`SET_COLUMN`), and about equally many
    tokens. Fillers of one token, which are in no pair, make the numbers of rows equal."""
    if ranks == 1:
        return rows
    lengths = rows.batch["attention_mask"].sum(dim=1).tolist()
    sets: dict[int, list[int]] = {}
    for row, number in enumerate(rows.batch[SET_COLUMN].tolist()):
        sets.setdefault(number, []).append(row)
    members = list(sets.values()) + [[]] * (-len(sets) % ranks)
    tokens = [sum(lengths[row] for row in member) for member in members]
    parts = get_seqlen_balanced_partitions(tokens, ranks, equal_size=True)
    rows_of_rank = [[row for index in part for row in members[index]] for part in parts]
    most, fillers = max(map(len, rows_of_rank)), iter(range(len(rows), ranks * len(rows)))
    order = [row for part in rows_of_rank for row in [*part, *(next(fillers) for _ in range(most - len(part)))]]
    return _add_fillers(rows, len(order)).select_idxs(torch.tensor(order))


def _add_fillers(rows: DataProto, count: int) -> DataProto:
    """Append rows without weight, up to `count` rows in total."""
    known = len(rows)
    rows.padding(count - known)
    columns = rows.batch
    columns["attention_mask"][known:, 1:] = 0
    for name, no_weight in ((PAIRS_COLUMN, -1), (GRADIENT_COLUMN, 0)):
        if name in columns.keys():
            columns[name][known:] = no_weight
    columns[INDEX_COLUMN][known:] = torch.arange(known, count)
    columns[SET_COLUMN][known:] = int(columns[SET_COLUMN].max()) + 1 + torch.arange(count - known)
    return rows


# -------------------------------------------------------------------- padding token


def padding_token(tokenizer: Any, vocab_size: int, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Return the tokenizer's padding token, or another special token below `vocab_size` that ends no response.

    transformers reads a classifier's score at the last token that is not padding: if the end token is also the padding
    token, it would read the score one token too early. It also does not train the embedding of the padding token, so a
    token that the chat template does not write is preferred.
    """
    special = tokenizer.added_tokens_decoder
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    candidates += [token_id for token_id, token in special.items() if token.special]
    known = [token_id for token_id in dict.fromkeys(candidates) if token_id is not None and token_id < vocab_size]
    end_tokens = find_end_tokens(None, None, tokenizer, template_kwargs).ids
    free = [token_id for token_id in known if token_id not in end_tokens]
    if not free:
        return _end_token_as_padding(tokenizer, vocab_size)
    template = str((template_kwargs or {}).get("chat_template") or tokenizer.chat_template or "")
    tokens = tokenizer.convert_ids_to_tokens(free)
    in_template = [
        token_id == tokenizer.bos_token_id or token in template for token_id, token in zip(free, tokens, strict=True)
    ]
    token = tokens[in_template.index(False)] if False in in_template else tokens[0]
    if token != tokenizer.pad_token:
        logger.info(
            "padding token: %r instead of %r, which ends responses or is not in the model's vocabulary",
            *(token, tokenizer.pad_token),
        )
    return token


def _end_token_as_padding(tokenizer: Any, vocab_size: int) -> str:
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= vocab_size:
        raise ValueError(
            f"model.path: the model has {vocab_size} tokens (vocab_size), which include neither the padding nor the end"
            f" token of its tokenizer ({tokenizer.pad_token!r} = {tokenizer.pad_token_id}, {tokenizer.eos_token!r} ="
            f" {tokenizer.eos_token_id}). Resize the model's embeddings, or use the model's original tokenizer."
        )
    logger.warning(
        "the tokenizer has no special token of the model except its end token %r, which is therefore also the padding"
        " token: transformers reads scores one token too early; here they are read at the end",
        tokenizer.eos_token,
    )
    return tokenizer.eos_token
