"""`verl check sft` and `verl check rm`: rows as the model sees them, which of their tokens count, lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl.cli.check_report import NOT_TRAINED, SCORED, TRAINED, ReportOutput, Segment
from verl.config import RMConfig, SFTConfig
from verl.config.problems import Report
from verl.config.supervised import SupervisedConfig

_DATA_KEYS = ("data.train_files", "data.val_files")


def check_sft(config: SFTConfig, rows: int, output: ReportOutput) -> None:
    """Check a run of `verl sft`; show the first `rows` rows."""
    from verl.config.sft import check_environment
    from verl.trainer.supervised.sft import create_sft_dataset
    from verl.utils import hf_tokenizer
    from verl.utils.fs import resolve_model_path

    _check_configuration(config, check_environment, output)
    folder = resolve_model_path(config.model.path, "model.path")
    tokenizer = hf_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    for key, is_train in _files(config):
        dataset = create_sft_dataset(config.data, tokenizer, is_train)
        items = [dataset[number] for number in range(len(dataset))]
        output.section(f"{key}: rows as the model sees them")
        for number, item in enumerate(items[: rows if is_train else 0]):
            output.segments(f"row {number}", list(labelled_segments(item)), tokenizer)
        trained = [int((item["loss_mask"] != 0).sum()) for item in items]
        output.line(f"{len(items)} rows; data.max_length = {config.data.max_length}")
        output.quantiles("tokens per row", [len(item["input_ids"]) for item in items])
        output.quantiles("trained tokens per row", trained)
        if trained.count(0):
            output.problem(f"{key}: {trained.count(0)} rows have no trained token")


def check_rm(config: RMConfig, rows: int, output: ReportOutput) -> None:
    """Check a run of `verl rm`; show a pair of each of the first `rows` prompts."""
    from verl.config.rm import check_environment
    from verl.models.loading import read_config
    from verl.trainer.supervised.rm import create_rm_dataset, prepare_tokenizer
    from verl.utils import hf_tokenizer
    from verl.utils.end_tokens import find_end_tokens
    from verl.utils.fs import resolve_model_path

    _check_configuration(config, check_environment, output)
    model = config.model
    folder = resolve_model_path(model.path, "model.path")
    tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    output.section("tokenizer and end tokens")
    prepare_tokenizer(config, hf_config, tokenizer)
    end_tokens = find_end_tokens(folder, hf_config, tokenizer, config.data.apply_chat_template_kwargs)
    output.line(end_tokens.describe(tokenizer))
    output.line(f"padding token: {tokenizer.pad_token} = {tokenizer.pad_token_id}")
    for key, is_train in _files(config):
        dataset = create_rm_dataset(config.data, tokenizer, is_train)
        items = [dataset[number] for number in range(len(dataset))]
        output.section(f"{key}: responses as the model sees them")
        for number, item in enumerate(items[: rows if is_train else 0]):
            _show_pair(number, item, tokenizer, output)
        _show_pair_statistics(key, items, config.data.max_length, output)
        responses = [ids for item in items for ids in item["answers"]]
        without_end = sum(int(ids[-1]) not in end_tokens.ids for ids in responses)
        if without_end:
            output.line(
                f"note: {without_end} of {len(responses)} responses do not end with an end token, where generation"
                " ends. Raise data.max_length, set data.truncation=left, or use a chat template that writes one."
            )


def _check_configuration(
    config: SupervisedConfig, check_environment: Callable[[Any, Report], None], output: ReportOutput
) -> None:
    """Report problems of files and user code. Rows of the data are checked when it is loaded."""
    from verl.trainer.common.preflight import supervised_preflight

    report = Report()
    check_environment(config, report)
    supervised_preflight(config, report)
    output.configuration(config, report)


def _files(config: SupervisedConfig) -> Iterator[tuple[str, bool]]:
    """Yield the keys with data files, and whether they are for training."""
    for key, files in zip(_DATA_KEYS, (config.data.train_files, config.data.val_files), strict=True):
        if files:
            yield key, key == _DATA_KEYS[0]


def labelled_segments(item: Mapping[str, Any]) -> Iterator[Segment]:
    """Yield the runs of tokens with and without loss of a row of `SFTDataset`."""
    ids, trained = item["input_ids"].tolist(), (item["loss_mask"] != 0).tolist()
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or trained[place] != trained[start]:
            yield Segment(ids[start:place], TRAINED if trained[start] else NOT_TRAINED)
            start = place


def _show_pair(number: int, item: Mapping[str, Any], tokenizer: Any, output: ReportOutput) -> None:
    """Show the first pair of a prompt; the score of a response is read at its last token."""
    chosen, rejected, preference, margin, weight = item["pairs"][0].tolist()
    count = f"{len(item['answers'])} responses, {len(item['pairs'])} pairs"
    target = f"preference {preference:g}, margin {margin:g}, weight {weight:g}"
    for name, index in (("chosen", int(chosen)), ("rejected", int(rejected))):
        ids, length = item["answers"][index].tolist(), item["answer_tokens"][index]
        parts = [Segment(ids[: len(ids) - length], "prompt"), Segment(ids[len(ids) - length : -1], "response")]
        segments = [part for part in parts if part.token_ids] + [Segment(ids[-1:], SCORED)]
        output.segments(f"prompt {number} ({count}): {name} ({target})", segments, tokenizer)


def _show_pair_statistics(key: str, items: Sequence[Mapping[str, Any]], limit: int, output: ReportOutput) -> None:
    """Print numbers of pairs and of tokens. A reward model that sees mostly longer chosen responses learns to prefer
    length."""
    pairs = [(item, *pair) for item in items for pair in item["pairs"].tolist()]
    equal = sum(chosen == rejected for _, chosen, rejected, *_ in pairs)
    ties = sum(preference == 0.5 for *_, preference, _, _ in pairs)
    lengths = [
        (item["answer_tokens"][int(chosen)], item["answer_tokens"][int(rejected)])
        for item, chosen, rejected, *_ in pairs
    ]
    longer = sum(chosen > rejected for chosen, rejected in lengths)
    output.line(f"{len(pairs)} pairs of {len(items)} prompts: {ties} ties, {equal} with equal responses")
    output.quantiles("tokens per response with its prompt", [len(ids) for item in items for ids in item["answers"]])
    output.line(f"data.max_length = {limit}")
    output.quantiles("tokens of chosen responses", [chosen for chosen, _ in lengths])
    output.quantiles("tokens of rejected responses", [rejected for _, rejected in lengths])
    output.line(f"the chosen response is longer in {longer / max(1, len(pairs)):.0%} of pairs")
    if not any(weight for *_, weight in pairs):
        output.problem(f"{key}: all pairs have weight 0")
    if equal == len(pairs):
        output.problem(f"{key}: both responses are equal in all pairs")
