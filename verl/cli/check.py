"""`verl check [train|sft|rm] key=value …`: check data, reward, tools, chat template and end tokens of a run.

It needs no GPU and prints one report: rows as the model sees them, which of their tokens are trained, scores of sample
answers, lengths. The exit code is 1 if the run would fail or its reward is not reliable, 2 if the configuration is
invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.cli.check_report import NOT_TRAINED, SCORED, TRAINED, ReportOutput, Segment
from verl.cli.run_config import add_run_arguments, compose_user_file, parse_run_arguments
from verl.config import ConfigError, PPOConfig, RMConfig, SFTConfig, load_config
from verl.config.layout import scored_by_model, uses_custom_agent_loop
from verl.config.problems import Report
from verl.config.supervised import SupervisedConfig
from verl.utils.import_utils import describe_error

if TYPE_CHECKING:
    from verl.agent.chat import Chat
    from verl.utils.end_tokens import EndTokens

# The source of end tokens that is preferred for shown answers.
_TEMPLATE = "chat template"
_DATA_KEYS = ("data.train_files", "data.val_files")


@dataclass(frozen=True)
class Turns:
    """A conversation with several turns, and the schemas of its tools."""

    chat: Chat
    schemas: Sequence[Mapping[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="verl check", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add_run_arguments(parser)
    parser.add_argument("--rows", type=int, default=2, help="rows to show (default: %(default)s)")
    parser.add_argument("--scored", type=int, default=64, help="rows to score (default: %(default)s)")
    options = parse_run_arguments(parser, arguments)
    output = ReportOutput()
    try:
        file = compose_user_file(options)
        overrides = options.overrides if file is None else []
        if options.program == "sft":
            check_sft(load_config(file, overrides, check_files=False, root=SFTConfig), options.rows, output)
        elif options.program == "rm":
            check_rm(load_config(file, overrides, check_files=False, root=RMConfig), options.rows, output)
        else:
            check_training(load_config(file, overrides, check_files=False), options.rows, options.scored, output)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (ValueError, OSError) as error:
        key = str(error).partition(":")[0]
        if not any(problem.startswith((f"{key} ", f"{key}:")) for problem in output.problems):
            # Otherwise the configuration section has reported it.
            output.problem(str(error))
    return output.verdict()


def check_training(config: PPOConfig, rows: int, scored: int, output: ReportOutput) -> None:
    """Check a run of `verl train`: show the first `rows` rows, score `scored` rows."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils import hf_tokenizer
    from verl.utils.fs import resolve_model_path

    _check_configuration(config, output)
    for module in config.external_libs:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # the user's module may raise anything
            raise ValueError(f"external_libs: {module}: {describe_error(error)}.") from error
    get_custom_reward_fn(config)  # its file may register the format of right answers
    model = config.actor_rollout_ref.model
    folder = resolve_model_path(model.path, "actor_rollout_ref.model.path")
    tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    end_tokens = _check_end_tokens(config, folder, tokenizer, output)
    turns = _check_turns(config, tokenizer, end_tokens, output)
    if config.data.custom_cls.path is None:
        for key in ("train_files", "val_files"):
            _check_files(config, key, tokenizer, output)
        _show_training_rows(config, tokenizer, turns, end_tokens, rows, output)
    _check_reward(config, scored, output)


def _check_configuration(config: PPOConfig, output: ReportOutput) -> None:
    """Report problems of files and user code, except those of this machine and of data, which is checked below."""
    from verl.config.files import check_environment
    from verl.trainer.common.preflight import ppo_preflight

    report = Report()
    check_environment(config, report)
    ppo_preflight(config, report)
    output.configuration(config, report, () if config.data.custom_cls.path else ("data.train_files", "data.val_files"))


def _check_end_tokens(config: PPOConfig, folder: str, tokenizer: Any, output: ReportOutput) -> EndTokens:
    from verl.models.loading import read_config
    from verl.utils.end_tokens import find_end_tokens

    output.section("tokenizer and end tokens")
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    hf_config = read_config(folder, model.trust_remote_code, model.override_config)
    kwargs = config.data.apply_chat_template_kwargs
    end_tokens = find_end_tokens(folder, hf_config, tokenizer, kwargs, rollout.stop_token_ids)
    has_template = bool(tokenizer.chat_template or "chat_template" in kwargs)
    output.line(f"{model.path}: {len(tokenizer)} tokens, {'with' if has_template else 'without'} a chat template")
    output.line(end_tokens.describe(tokenizer, rollout.ignore_eos))
    if not end_tokens.ids:
        output.problem("no token ends a response: all reach their length limit. Set rollout.stop_token_ids.")
    return end_tokens


def _check_turns(config: PPOConfig, tokenizer: Any, end_tokens: EndTokens, output: ReportOutput) -> Turns | None:
    """Load the tools, check them and the chat template in several turns; None if there is only one turn."""
    from verl.agent.chat import Chat
    from verl.agent.chat_check import check_template
    from verl.agent.toolbox import Toolbox

    turns = config.actor_rollout_ref.rollout.multi_turn
    if not turns.enable:
        return None
    output.section("tools and turns")
    toolbox = Toolbox.load(turns)

    async def check_tools() -> None:
        try:
            await toolbox.check()
        finally:
            await toolbox.close()

    try:
        asyncio.run(check_tools())
    except ConfigError as error:
        output.problem(str(error))
    schemas = toolbox.schemas()
    for schema in schemas:
        function = schema["function"]
        arguments = ", ".join(function.get("parameters", {}).get("properties", {}))
        output.line(f"{function['name']}({arguments}): {function.get('description', '')}")
    chat = Chat(tokenizer, schemas, end_tokens.turn_ids, **config.data.apply_chat_template_kwargs)
    try:
        for finding in check_template(chat, turns.tokenization_sanity_check_mode):
            output.line(f"note: {finding}")
    except ValueError as error:
        output.problem(str(error))
    else:
        output.line("tokens appended turn by turn are those of the chat template")
    return Turns(chat, schemas)


def _check_files(config: PPOConfig, key: str, tokenizer: Any, output: ReportOutput) -> None:
    """Check every row of the files of a key: schema, prompt lengths, reward per data source."""
    from verl.trainer.data_check import check_data
    from verl.trainer.data_check_command import show_report

    data = config.data
    if not data[key]:
        return
    output.section(f"data.{key}")
    report = check_data(
        data[key],
        tokenizer=tokenizer,
        template_kwargs=data.apply_chat_template_kwargs,
        system_prompt=data.system_prompt,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        ground_truth_key=data.ground_truth_key,
        limits=[data.max_prompt_length],
        any_source=_has_own_reward(config),
        samples=0,
    )
    if key != "train_files":
        report.columns = []
    show_report(report, output.console)
    output.problems += report.problems


def _has_own_reward(config: PPOConfig) -> bool:
    """Return whether scores come from something other than the built-in reward functions."""
    return config.custom_reward_function.path is not None or scored_by_model(config) or uses_custom_agent_loop(config)


def _show_training_rows(
    config: PPOConfig, tokenizer: Any, turns: Turns | None, end_tokens: EndTokens, count: int, output: ReportOutput
) -> None:
    """Show the first rows as the model sees them, followed by a sample answer."""
    from verl.utils.dataset.chat import PromptEncoder
    from verl.utils.dataset.rows import Rows, find_files, value_at

    data = config.data
    output.section("rows as the model sees them; the responses are samples")
    rows = Rows(find_files(data.train_files, "train"))
    encoder = PromptEncoder(tokenizer, data.apply_chat_template_kwargs, system_prompt=data.system_prompt)
    end = min(end_tokens.ids, key=lambda number: (_TEMPLATE not in end_tokens.named_by[number], number), default=None)
    ends = [] if end is None else [end]
    for number in range(min(count, len(rows))):
        row = rows[number]
        messages = encoder.messages(value_at(row, data.prompt_key))
        prompt = encoder.encode([messages])[0] if turns is None else turns.chat.prompt_ids(messages)
        answer = tokenizer.encode(_sample_answer(config, row), add_special_tokens=False) + ends
        tool_turn = [] if turns is None else _tool_turn(turns.chat, turns.schemas)
        segments = [Segment(prompt, NOT_TRAINED), *tool_turn, Segment(answer, TRAINED)]
        output.segments(rows.where(number), segments, tokenizer)
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt:
            output.problem(f"{rows.where(number)}: the prompt has text that the tokenizer does not know.")


def _sample_answer(config: PPOConfig, row: dict[str, Any]) -> str:
    """Return the ground truth of a row in the format of its reward function, if that is known."""
    from verl.utils.dataset.rows import ground_truth_of, value_at
    from verl.utils.reward_score.calls import correct_response

    truth = ground_truth_of(row, config.data.ground_truth_key)
    try:
        answer = correct_response(str(value_at(row, config.data.reward_fn_key)), truth)
    except (ValueError, TypeError):  # the data check has reported it
        answer = None
    return answer if answer is not None else "(response)" if truth is None else str(truth)


def _tool_turn(chat: Chat, schemas: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Return a call of the first tool as the chat template writes it, and a result; empty if it writes no calls."""
    from verl.utils.turn_template import FIRST, tool_message

    if not schemas or not chat.style.tool_role:
        return []
    function = schemas[0]["function"]
    arguments: Any = {name: "1" for name in function.get("parameters", {}).get("properties", {})}
    call = {"name": function["name"], "arguments": arguments if chat.style.dict_arguments else json.dumps(arguments)}
    result = tool_message(function["name"], "1")
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": result["tool_call_id"], "type": "function", "function": call}],
    }
    before = chat.render([FIRST], generation_prompt=True)
    token_ids = chat.encode(chat.render([FIRST, answer], generation_prompt=False).removeprefix(before))
    end = next((place for place, token in enumerate(token_ids, start=1) if token in chat.end_ids), len(token_ids))
    return [Segment(token_ids[:end], TRAINED), Segment(chat.suffix([result], token_ids[:end]), NOT_TRAINED)]


def _check_reward(config: PPOConfig, scored: int, output: ReportOutput) -> None:
    """Try the reward function on rows of the training files."""
    from verl.trainer.data_check import check_reward_function
    from verl.trainer.data_check_command import show_report

    output.section("reward")
    if scored_by_model(config) or not config.distillation.scores_responses:
        output.line("not checked: responses are scored by a model, or not at all")
        return
    if uses_custom_agent_loop(config):
        output.line("not checked: the agent loop may return the score itself")
        return
    report = check_reward_function(config.data.train_files, n=scored, config=config)
    show_report(report, output.console)
    if report.failed:
        output.problem("the reward function cannot be trusted: see the table of its checks")


def check_sft(config: SFTConfig, rows: int, output: ReportOutput) -> None:
    """Check a run of `verl sft`; show the first `rows` rows."""
    from verl.config.sft import check_environment
    from verl.trainer.supervised.sft import create_sft_dataset
    from verl.utils import hf_tokenizer
    from verl.utils.fs import resolve_model_path

    _check_supervised_configuration(config, check_environment, output)
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

    _check_supervised_configuration(config, check_environment, output)
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


def _check_supervised_configuration(
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
