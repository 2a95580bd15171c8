"""Validation rules for data files, checked before training.

Each broken rule is reported once per file, with the first row and a fix. If an Arrow column's type and null count
guarantee that a rule holds, its rows are not checked, so that large valid files take little time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from verl.config import DataConfig, names
from verl.utils.dataset.rows import GROUND_TRUTH, ArrowFile, DataFile, Rows, ground_truth_of, value_at
from verl.utils.exceptions import PicklableError
from verl.utils.reward_score.registry import matching, unknown_source

# Columns that decide whether a reward function, a reward model or an agent loop scores a row.
_SCORING_COLUMNS = ("reward_model", "agent_name")
RowCheck = Callable[[dict[str, Any], Sequence[str]], str | None]
"""(row, columns of its file) -> the problem of the row and how to fix it; None: the row is valid."""
_ROWS_PER_READ = 4096


class DataError(PicklableError, ValueError):
    """The data cannot be used. `problems`: all reasons; `str()` is their numbered list."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count != 1 else ''} in the data:"]
        super().__init__("\n".join(lines + [f"{number}. {text}" for number, text in enumerate(self.problems, 1)]))


@dataclass(frozen=True)
class RowRule:
    """A requirement of the rows of a data file."""

    columns: tuple[str, ...]
    """The columns that `check` reads."""
    check: RowCheck
    holds_for_table: Callable[[pa.Table], bool]
    """Whether the rule certainly holds for all rows, by column types and null counts. If not, the rows are checked."""


def find_problems(rows: Rows, rules: Sequence[RowRule]) -> list[str]:
    """Return a message per file and broken rule: the first invalid row, the number of others, and the fix."""
    problems = []
    for data_file in rows.data_files:
        if len(data_file) == 0:
            problems.append(
                f"{data_file.file}: the file has no rows. Write it again, or remove it from the list of files."
            )
            continue
        for row, count, problem in _broken_rules(data_file, rules):
            more = count - 1
            others = f" (and {more} more row{'s' if more > 1 else ''})" if more else ""
            problems.append(f"{data_file.where(row)}{others}: {problem}")
    return problems


def raise_problems(rows: Rows, rules: Sequence[RowRule]) -> None:
    """Raise a DataError with all problems, if there are any."""
    if problems := find_problems(rows, rules):
        raise DataError(problems)


def missing_columns(rows: Rows, config: Any, options: Sequence[str]) -> dict[str, str]:
    """Return the problems of `options` (config keys of optional columns, such as `tools_key`), by option.

    A column that no file has would be ignored. That is a problem if the user has set the option, i.e. if its value is
    not the default (`tools` for `tools_key`).
    """
    problems = {}
    for option in options:
        key = getattr(config, option)
        if key != option.removesuffix("_key") and key.split(".")[0] not in rows.columns:
            problems[option] = (
                f"data.{option} = {key}: no file has this column. Correct the key, or remove it."
                f" Columns: {', '.join(rows.columns) or 'none'}."
            )
    return problems


def raise_missing_columns(rows: Rows, config: Any, options: Sequence[str]) -> None:
    """Raise a DataError with all problems of `missing_columns`, if there are any."""
    problems = missing_columns(rows, config, options)
    if problems:
        raise DataError(list(problems.values()))


def chat_rule(key: str, option: str) -> RowRule:
    """Rule: `key` has a prompt: text, or a list of {role, content}. `option`: config key that selects the column."""
    return _value_rule(key, option, chat_problem, _is_valid_chat)


def rl_rules(
    config: DataConfig, data_sources: Collection[str] | None, ground_truth: bool, default_loop: str | None = None
) -> list[RowRule]:
    """Rules for the rows of RL data; parameters as in `RLHFDataset.validate`."""
    rules = [chat_rule(config.prompt_key, "data.prompt_key")]
    if data_sources is not None:
        rules += data_source_rules(config.reward_fn_key, data_sources, default_loop=default_loop)
    if ground_truth:
        rules.append(ground_truth_rule(config.ground_truth_key, default_loop))
    return rules


def sft_rules(config: Any, columns: Collection[str]) -> list[RowRule]:
    """Rules for the rows of SFT data in files with these columns: a conversation, or a prompt and a response."""
    if config.messages_key in columns:
        return [chat_rule(config.messages_key, "data.messages_key")]
    return [chat_rule(config.prompt_key, "data.prompt_key"), text_rule(config.response_key, "data.response_key")]


def text_rule(key: str, option: str) -> RowRule:
    """Rule: `key` has a non-empty string."""
    return _value_rule(key, option, _text_problem, _is_valid_text)


def present_rule(key: str, option: str) -> RowRule:
    """Rule: `key` has a value, of any type."""
    return _value_rule(key, option, lambda key, value: None, lambda column: column.null_count == 0)


def data_source_rules(
    key: str, known: Collection[str], exempt_reward_model: bool = False, default_loop: str | None = None
) -> list[RowRule]:
    """Rules: `key` has the name of a data source with a reward function, one of `known` (names or patterns).

    Rows that their agent loop may score are exempt, and with `exempt_reward_model` rows that a reward model scores.
    Rows without an `agent_name` run in `default_loop`.
    """
    hint = " With custom_reward_function.path, no data source is needed."
    rules = [_value_rule(key, "data.reward_fn_key", _text_problem, _is_valid_text, hint), _source_rule(key, known)]
    is_exempt = partial(_is_exempt, exempt_reward_model=exempt_reward_model, default_loop=default_loop)
    return [_with_exemption(rule, is_exempt) for rule in rules]


def _with_exemption(rule: RowRule, is_exempt: Callable[[dict[str, Any]], bool]) -> RowRule:
    """Return the rule for all rows that are not exempt from it."""

    def check(row: dict[str, Any], columns: Sequence[str]) -> str | None:
        return None if is_exempt(row) else rule.check(row, columns)

    return RowRule((*rule.columns, *_SCORING_COLUMNS), check, rule.holds_for_table)


def _source_rule(key: str, known: Collection[str]) -> RowRule:
    """Rule: the data source in `key`, if it is a string, is one of `known`. `_text_problem` reports other types."""

    def check(row: dict[str, Any], columns: Sequence[str]) -> str | None:
        source = value_at(row, key)
        if not isinstance(source, str) or matching(source, known):
            return None
        return unknown_source(source, known, key)

    def holds_for_table(table: pa.Table) -> bool:
        if key not in table.column_names:
            return True
        return all(matching(str(source), known) for source in pc.unique(table.column(key)).to_pylist())

    return RowRule((key.split(".")[0],), check, holds_for_table)


def ground_truth_rule(key: str = GROUND_TRUTH, default_loop: str | None = None) -> RowRule:
    """Rule: the row has a ground truth, in `reward_model.ground_truth` or in `key` (`data.ground_truth_key`), unless a
    reward model or its agent loop scores it."""

    def check(row: dict[str, Any], columns: Sequence[str]) -> str | None:
        reward = row.get("reward_model")
        if reward is not None and not isinstance(reward, dict):
            return f"'reward_model' is {_type_name(reward)}. Write it as {{style, ground_truth}}."
        if ground_truth_of(row, key) is not None or _is_exempt(row, True, default_loop):
            return None
        return (
            "the row has no ground truth. Set data.ground_truth_key to the column with the ground truth, or write"
            " reward_model={'style': 'rule', 'ground_truth': …} (style 'model' if a reward model scores the row,"
            f" 'agent' if its agent loop does). Columns: {', '.join(columns)}."
        )

    def holds_for_table(table: pa.Table) -> bool:
        if "reward_model" not in table.column_names:
            return key in table.column_names and table.column(key).null_count == 0
        kind = table.schema.field("reward_model").type
        if not pa.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
            return False
        return pc.struct_field(table.column("reward_model"), "ground_truth").null_count == 0

    return RowRule((key.split(".")[0], *_SCORING_COLUMNS), check, holds_for_table)


def uses_reward_model(row: Mapping[str, Any]) -> bool:
    """Return whether a reward model scores the row, instead of a rule."""
    return _style(row) == "model"


def is_scored_by_agent(row: Mapping[str, Any], default_loop: str | None = None) -> bool:
    """Return whether the row's agent loop may return its score: by the row's style, or as a user's loop.

    `default_loop`: the agent loop of rows without an `agent_name`.
    """
    loop = row.get("agent_name") or default_loop
    return _style(row) == "agent" or (loop is not None and loop not in names.AGENT_LOOPS)


def _is_exempt(row: Mapping[str, Any], exempt_reward_model: bool, default_loop: str | None) -> bool:
    return is_scored_by_agent(row, default_loop) or (exempt_reward_model and uses_reward_model(row))


def _style(row: Mapping[str, Any]) -> Any:
    reward = row.get("reward_model")
    return reward.get("style") if isinstance(reward, dict) else None


def chat_problem(key: str, value: Any) -> str | None:
    """Return the problem of a prompt value and how to fix it; None: it is valid."""
    if isinstance(value, str):
        return _text_problem(key, value)
    if not isinstance(value, list):
        return f"{key!r} is {_type_name(value)}. Write it as text or as a list of {{role, content}}."
    if not value:
        return f"{key!r} has no messages. Fill it, or remove the row."
    for number, message in enumerate(value):
        position = f"message {number} of {key!r}"
        if not isinstance(message, dict):
            return f"{position} is {_type_name(message)}. Write it as {{role, content}}."
        if not isinstance(message.get("role"), str):
            keys = ", ".join(message) or "nothing"
            return f"{position} has no 'role' (found: {keys}). Set it to user, system or assistant."
        problem = _content_problem(message.get("content"))
        if problem is not None and not (message.get("content") is None and message.get("tool_calls")):
            return f"the 'content' of {position} is {problem}"
    return None


def _text_problem(key: str, value: Any) -> str | None:
    if not isinstance(value, str):
        return f"{key!r} is {_type_name(value)}, not a string. Write it as text."
    return None if value else f"{key!r} is empty. Fill it, or remove the row."


def _value_rule(
    key: str,
    option: str,
    problem: Callable[[str, Any], str | None],
    is_valid: Callable[[pa.ChunkedArray], bool],
    hint: str = "",
) -> RowRule:
    """Rule: `key` has a value, and `problem(key, value)` is None. `is_valid`: whether this certainly holds for a whole
    column. `hint`: added to the message if the column does not exist."""

    def check(row: dict[str, Any], columns: Sequence[str]) -> str | None:
        value = value_at(row, key)
        if value is not None:
            return problem(key, value)
        if key in row:
            return f"{key!r} is null. Fill it, or remove the row."
        available = f"Columns: {', '.join(columns) or 'none'}."
        if key.split(".")[0] in columns:  # JSON rows may have different keys, and nested keys may be missing
            return (
                f"the row has no {key!r}. Add it, remove the row, or set {option} to another column.{hint} {available}"
            )
        return f"the column {key!r} does not exist. Set {option} to the column with these values.{hint} {available}"

    def holds_for_table(table: pa.Table) -> bool:
        return key in table.column_names and is_valid(table.column(key))

    return RowRule((key.split(".")[0],), check, holds_for_table)


def _content_problem(content: Any) -> str | None:
    """Return the problem of the content of a message and how to fix it; None: it is valid (text or a list of parts)."""
    if isinstance(content, str):
        return None
    if content is None:
        return "missing or null. Write it as text."
    if not isinstance(content, list):
        return f"{_type_name(content)}. Write it as text."
    if not content:
        return "an empty list. Fill it, or remove the row."
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            return f"a list whose part {number} is {_type_name(part)}. Write text, or parts {{type: text, text: …}}."
        if not isinstance(part.get("type"), str):
            return f"a list whose part {number} has no 'type'. Write text, or parts {{type: text, text: …}}."
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            return f"a list whose part {number} has {_type_name(part.get('text'))} as its 'text'. Write it as text."
    return None


def _broken_rules(data_file: DataFile, rules: Sequence[RowRule]) -> list[tuple[int, int, str]]:
    """Return for each broken rule: the first row that breaks it, the number of such rows, and the problem of the first.

    Rows are read once for all rules.
    """
    if isinstance(data_file, ArrowFile):
        rules = [rule for rule in rules if not _holds_for_table(rule, data_file.table)]
    columns = list(dict.fromkeys(name for rule in rules for name in rule.columns))
    first: dict[int, tuple[int, str]] = {}
    counts = [0] * len(rules)
    for start in range(0, len(data_file) if rules else 0, _ROWS_PER_READ):
        rows = data_file.rows(start, min(start + _ROWS_PER_READ, len(data_file)), columns)
        for number, rule in enumerate(rules):
            for position, row in enumerate(rows, start):
                problem = rule.check(row, data_file.columns)
                if problem is not None:
                    counts[number] += 1
                    first.setdefault(number, (position, problem))
    return [(row, counts[number], problem) for number, (row, problem) in sorted(first.items())]


def _holds_for_table(rule: RowRule, table: pa.Table) -> bool:
    try:
        return rule.holds_for_table(table)
    except (ValueError, NotImplementedError):  # a value or type that pyarrow cannot convert: the rows are checked
        return False


def _type_name(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_valid_text(column: pa.ChunkedArray) -> bool:
    if not _is_text(column.type) or column.null_count:
        return False
    return not pc.any(pc.equal(pc.binary_length(column), 0)).as_py()


def _is_valid_chat(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if _is_text(kind):
        return _is_valid_text(column)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    if column.null_count or pc.any(pc.equal(pc.list_value_length(column), 0)).as_py():
        return False
    fields = kind.value_type
    if fields.get_field_index("role") < 0 or fields.get_field_index("content") < 0:
        return False
    if not (_is_text(fields.field("role").type) and _is_text(fields.field("content").type)):
        return False
    messages = pc.list_flatten(column)
    return all(pc.struct_field(messages, name).null_count == 0 for name in ("role", "content"))
