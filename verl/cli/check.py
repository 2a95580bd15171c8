"""`verl check [train|sft] key=value …`: check data, reward, tools, chat template and end tokens of a run.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl.cli.main import unknown_name
from verl.config import ConfigError, PPOConfig, SFTConfig, load_config
from verl.config.layout import scored_by_model, uses_custom_agent_loop
from verl.config.problems import Report

if TYPE_CHECKING:
    from verl.agent.chat import Chat
    from verl.utils.end_tokens import EndTokens

_KINDS = ("train", "sft")
# Problems of this machine, not of the run: it may start on another one.
_OTHER_MACHINE = ("trainer.device", "trainer.logger")
_MAX_TEXT = 600  # characters of a segment
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
# The source of end tokens that is preferred for shown answers.
_TEMPLATE = "chat template"


@dataclass(frozen=True)
class Options:
    """`file` and `overrides` of the run; `rows`: number of rows to show; `scored`: number of rows to score."""

    file: DictConfig | None
    overrides: list[str]
    rows: int
    scored: int


@dataclass
class ReportOutput:
    """Prints sections of the report and collects problems."""

    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    problems: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self.console.print(f"\n[bold]== {title}[/]")

    def line(self, text: str) -> None:
        self.console.print(escape(text))

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
            self.console.print(f"[red]problem:[/] {escape(text)}")

    def verdict(self) -> int:
        """Print all problems again; return the exit code."""
        self.section("result")
        for number, problem in enumerate(self.problems, start=1):
            self.console.print(f"[red]{number}.[/] {escape(problem)}")
        self.console.print("[red]not ready[/]" if self.problems else "[green]ok[/]: the run can start")
        return int(bool(self.problems))


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a row that are all trained, or all not."""

    token_ids: Sequence[int]
    trained: bool


@dataclass(frozen=True)
class Turns:
    """A conversation with several turns, and the schemas of its tools."""

    chat: Chat
    schemas: Sequence[Mapping[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="verl check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="train (default) or sft, then overrides of the run"
    )
    parser.add_argument("--config-path", help="folder of a YAML file of the run")
    parser.add_argument("--config-name", help="name of the YAML file")
    parser.add_argument("--rows", type=int, default=2, help="rows to show (default: %(default)s)")
    parser.add_argument("--scored", type=int, default=64, help="rows to score (default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    kind, overrides = "train", options.words
    if overrides and "=" not in overrides[0]:
        kind, overrides = overrides[0], overrides[1:]
        if kind not in _KINDS:
            sys.stderr.write(unknown_name("check", kind, _KINDS))
            return 2
    output = ReportOutput()
    try:
        file = read_config_file(options.config_path, options.config_name)
        checked = Options(file, overrides, options.rows, options.scored)
        (check_training if kind == "train" else check_sft)(checked, output)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (ValueError, OSError) as error:
        output.problem(str(error))
    return output.verdict()


def read_config_file(folder: str | None, name: str | None) -> DictConfig | None:
    """Return the user's YAML file; None without one. Raises ValueError for a file that Hydra has to compose."""
    if name is None:
        return None
    file = Path(folder or ".").expanduser() / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    content = OmegaConf.load(file)
    if not isinstance(content, DictConfig) or "defaults" in content:
        raise ValueError(
            f"--config-name: {file} has a defaults list. Write the composed file with verl train --config-name …"
            " --cfg job, and check that."
        )
    return content


# -------------------------------------------------------------------- reinforcement learning


def check_training(options: Options, output: ReportOutput) -> None:
    """Check the configuration of `verl train`, section by section."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.utils import hf_tokenizer
    from verl.utils.fs import resolve_model_path

    config = load_config(options.file, options.overrides, check_files=False)
    _check_configuration(config, output)
    for module in config.external_libs:
        importlib.import_module(module)
    get_custom_reward_fn(config)  # its file may register the format of right answers
    model = config.actor_rollout_ref.model
    folder = resolve_model_path(model.path, "actor_rollout_ref.model.path")
    tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
    end_tokens = _check_end_tokens(config, folder, tokenizer, output)
    turns = _check_turns(config, tokenizer, end_tokens, output)
    if config.data.custom_cls.path is None:
        for key in ("train_files", "val_files"):
            _check_files(config, key, tokenizer, output)
        _show_training_rows(config, tokenizer, turns, end_tokens, options.rows, output)
    _check_reward(config, options, output)


def _check_configuration(config: PPOConfig, output: ReportOutput) -> None:
    """Report problems of files and user code, except those of this machine and of data, which is checked below."""
    from verl.config.files import check_environment
    from verl.trainer.common.preflight import ppo_preflight

    output.section("configuration")
    report = Report()
    check_environment(config, report)
    ppo_preflight(config, report)
    checked_below = () if config.data.custom_cls.path else ("data.train_files", "data.val_files")
    for problem in report.problems:
        if problem.key not in (*_OTHER_MACHINE, *checked_below):
            output.problem(str(problem))
    for notice in (*config.notices, *report.notices):
        output.line(f"note: {notice}")
    output.line(f"{len(config.changed)} keys differ from their defaults")


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
        for finding in chat.check(turns.tokenization_sanity_check_mode):
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
    """Return whether scores come from something else than the built-in reward functions."""
    return config.custom_reward_function.path is not None or scored_by_model(config) or uses_custom_agent_loop(config)


def _show_training_rows(
    config: PPOConfig, tokenizer: Any, turns: Turns | None, end_tokens: EndTokens, count: int, output: ReportOutput
) -> None:
    """Show the first rows as the model sees them, followed by a sample answer."""
    from verl.utils.dataset.chat import PromptEncoder
    from verl.utils.dataset.files import find_files
    from verl.utils.dataset.rows import Rows, value_at

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
        _show_segments(
            rows.where(number), [Segment(prompt, False), *tool_turn, Segment(answer, True)], tokenizer, output
        )
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt:
            output.problem(f"{rows.where(number)}: the prompt has text that the tokenizer does not know.")


def _sample_answer(config: PPOConfig, row: dict[str, Any]) -> str:
    """Return the ground truth of a row in the format of its reward function, if that is known."""
    from verl.utils.dataset.problems import ground_truth_of
    from verl.utils.dataset.rows import value_at
    from verl.utils.reward_score.trial import correct_response

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
    call = {"name": function["name"], "arguments": arguments if chat.style.objects else json.dumps(arguments)}
    result = tool_message(function["name"], "1")
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": result["tool_call_id"], "type": "function", "function": call}],
    }
    before = chat.render([FIRST], generation_prompt=True)
    token_ids = chat.encode(chat.render([FIRST, answer], generation_prompt=False).removeprefix(before))
    end = next((place for place, token in enumerate(token_ids, start=1) if token in chat.end_ids), len(token_ids))
    return [Segment(token_ids[:end], True), Segment(chat.suffix([result], token_ids[:end]), False)]


def _check_reward(config: PPOConfig, options: Options, output: ReportOutput) -> None:
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
    report = check_reward_function(config.data.train_files, n=options.scored, config=config)
    show_report(report, output.console)
    if report.failed:
        output.problem("the reward function cannot be trusted: see the table of its checks")


# -------------------------------------------------------------------- supervised fine-tuning


def check_sft(options: Options, output: ReportOutput) -> None:
    """Check the configuration of `verl sft`: rows, trained tokens, lengths."""
    from verl.config.sft import check_environment
    from verl.trainer.common.preflight import supervised_preflight
    from verl.trainer.supervised.sft import create_sft_dataset
    from verl.utils import hf_tokenizer
    from verl.utils.fs import resolve_model_path

    config = load_config(options.file, options.overrides, check_files=False, root=SFTConfig)
    output.section("configuration")
    report = Report()
    check_environment(config, report)
    supervised_preflight(config, report)
    for problem in report.problems:
        if problem.key not in _OTHER_MACHINE:
            output.problem(str(problem))
    folder = resolve_model_path(config.model.path, "model.path")
    tokenizer = hf_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
    dataset = create_sft_dataset(config.data, tokenizer, is_train=True)
    output.section("rows as the model sees them")
    for number in range(min(options.rows, len(dataset))):
        _show_segments(f"row {number}", list(_runs(dataset[number])), tokenizer, output)
    _show_lengths([dataset[number] for number in range(len(dataset))], config.data.max_length, output)


def _runs(item: Any) -> Iterator[Segment]:
    """Yield the runs of tokens with and without loss."""
    ids, trained = item["input_ids"].tolist(), (item["loss_mask"] != 0).tolist()
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or trained[place] != trained[start]:
            yield Segment(ids[start:place], trained[start])
            start = place


def _show_lengths(items: Sequence[Any], limit: int, output: ReportOutput) -> None:
    import numpy as np

    output.section("lengths")
    lengths = np.array([len(item["input_ids"]) for item in items])
    trained = np.array([int((item["loss_mask"] != 0).sum()) for item in items])
    for name, values in (("tokens", lengths), ("trained tokens", trained)):
        quantiles = ", ".join(f"{share:.0%} ≤ {int(np.quantile(values, share))}" for share in _QUANTILES)
        output.line(f"{name}: {quantiles}; {int(values.sum())} in {len(values)} rows")
    output.line(f"data.max_length = {limit}")
    if not trained.all():
        output.problem(f"{int((trained == 0).sum())} rows have no trained token")


def _show_segments(where: str, segments: Sequence[Segment], tokenizer: Any, output: ReportOutput) -> None:
    table = Table("", "tokens", "text", title=escape(where), title_justify="left", show_lines=True)
    for segment in segments:
        text = tokenizer.decode(segment.token_ids, skip_special_tokens=False)
        shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
        label = "[green]trained[/]" if segment.trained else "not trained"
        table.add_row(label, str(len(segment.token_ids)), escape(shown))
    output.console.print(table)
