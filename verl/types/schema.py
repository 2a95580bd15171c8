"""The columns of a batch in one table: content, padding value, producer, and the calls that read them.

Trimming, padding, column selection for a call, reserved names and `docs/reference/columns.md` are derived from it.
Columns that are not in the table belong to the user: they are passed on unchanged, and each call decides whether it
receives them.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Axis: TypeAlias = Literal["prompt", "response", "sequence", "row", "object"]
PROMPT: Axis = "prompt"  # [rows, P], padded on the left
RESPONSE: Axis = "response"  # [rows, R], padded on the right
SEQUENCE: Axis = "sequence"  # [rows, P + R]: a prompt and its response
ROW: Axis = "row"  # [rows, …]: one value per row, of any shape
OBJECT: Axis = "object"  # an object array [rows], in non_tensor_batch

Call: TypeAlias = Literal[
    "generate",
    "infer",
    "old_log_prob",
    "reward_model",
    "reward",
    "correction",
    "advantage",
    "metrics",
    "update_actor",
    "update_critic",
    "dump",
]
_PASSES: tuple[Call, ...] = ("infer", "reward_model")
_UPDATES: tuple[Call, ...] = ("update_actor", "update_critic")
_DATA = "data"


@dataclass(frozen=True)
class Column:
    """One column. `dtype`: the torch dtype, or the Python type of the entries of an object column."""

    name: str
    axis: Axis
    dtype: str
    filler: float | None
    """Padding value; None for token ids (the tokenizer's pad token) and for columns without padding."""
    producer: str
    read_by: tuple[Call, ...]
    meaning: str


_TABLE = (
    Column("prompts", PROMPT, "int64", None, "rollout", (*_PASSES, "reward", "dump"), "token ids"),
    Column("responses", RESPONSE, "int64", None, "rollout", (*_PASSES, *_UPDATES, "reward", "dump"),
           "token ids sampled by the model or returned by its environment"),
    Column("input_ids", SEQUENCE, "int64", None, "dataset, rollout", ("generate", *_PASSES, *_UPDATES),
           "prompts and responses; before generation [B, P]"),
    Column("attention_mask", SEQUENCE, "int64", 0, "dataset, rollout",
           ("generate", *_PASSES, *_UPDATES, "reward", "metrics"), "1 on tokens, 0 on padding"),
    Column("position_ids", SEQUENCE, "int64", 0, "dataset, rollout", ("generate", *_PASSES, *_UPDATES),
           "positions in the row, 0 at its first token"),
    Column("response_mask", RESPONSE, "int64", 0, "rollout",
           (*_PASSES, *_UPDATES, "reward", "correction", "advantage", "metrics"),
           "1 exactly on tokens that the model sampled and that are trained on"),
    Column("loss_weights", RESPONSE, "float32", 0, _DATA, (),
           "loss weight of each token, in supervised batches where weights differ"),
    Column("rollout_log_probs", RESPONSE, "float32", 0, "rollout", ("correction", "metrics"),
           "log-probs of the sampled tokens at the temperature, from the engine; NaN: unknown"),
    Column("rollout_drawn_log_probs", RESPONSE, "float32", 0, "rollout", ("correction", "metrics"),
           "the same under the distribution after top-p, top-k and min-p"),
    Column("rollout_versions", RESPONSE, "int64", -1, "rollout", (),
           "version of the weights that sampled each token; -1: not sampled or unknown"),
    Column("routed_experts", SEQUENCE, "uint8, int16", 255, "rollout, actor", ("old_log_prob", "update_actor"),
           "[B, P+R, layers, k]: experts of each token in a mixture of experts; largest value of the dtype: unknown"),
    Column("turn_rewards", RESPONSE, "float32", 0, "rollout", ("reward",),
           "reward of each turn, on the last token sampled before its end; part of the scores"),
    Column("rm_scores", RESPONSE, "float32", 0, "reward model", ("reward",),
           "score of the reward model, on the last sampled token"),
    Column("token_level_scores", RESPONSE, "float32", 0, "reward", ("advantage", "metrics", "dump"),
           "the score, on the last sampled token, plus turn rewards, on the last token of their turns"),
    Column("answer_scores", ROW, "float32", None, "reward", ("metrics",),
           "the score without turn rewards, on the row that is scored; decides whether a response is correct"),
    Column("old_log_probs", RESPONSE, "float32", 0, "actor", ("correction", "advantage", "metrics", "update_actor"),
           "log-probs under the policy before its update"),
    Column("entropys", RESPONSE, "float32", 0, "actor", (), "entropy of the distribution at each token"),
    Column("ref_log_prob", RESPONSE, "float32", 0, "reference", ("advantage", "metrics", "update_actor"),
           "log-probs under the reference policy"),
    Column("teacher_log_prob", RESPONSE, "float32", 0, "teacher", ("advantage", "metrics", "update_actor"),
           "log-probs under the row's teacher, with distillation"),
    Column("teacher_top_ids", RESPONSE, "int32", 0, "teacher", ("update_actor",),
           "[B, R, K]: the teacher's most likely tokens at each position, for a loss over them"),
    Column("teacher_top_log_probs", RESPONSE, "float32", 0, "teacher", ("update_actor",),
           "[B, R, K]: log-probs of these tokens"),
    Column("values", RESPONSE, "float32", 0, "critic", ("advantage", "metrics", "update_critic"),
           "expected return before each token"),
    Column("last_value", ROW, "float32", None, "critic", ("advantage",), "expected return after the row's last token"),
    Column("token_level_rewards", RESPONSE, "float32", 0, "advantage", ("metrics",),
           "scores minus the KL penalty, if that is part of the reward"),
    Column("reward_baselines", ROW, "float32", None, "reward", ("advantage",), "score of the prompt's greedy response"),
    Column("advantages", RESPONSE, "float32", 0, "advantage", ("metrics", "update_actor"),
           "advantages, for the policy loss"),
    Column("returns", RESPONSE, "float32", 0, "advantage", ("metrics", "update_critic"),
           "returns: targets of the critic"),
    Column("rollout_is_weights", RESPONSE, "float32", 0, "correction", ("update_actor",),
           "importance weight of each token, for the mismatch between rollout and trainer"),
    Column("denominator_log_probs", RESPONSE, "float32", 0, "correction", ("update_actor",),
           "log-probs of the rollout in the importance ratio, if the update computes the weights; NaN: unknown"),
    Column("trajectory_tokens", ROW, "int64", None, "trainer", _UPDATES,
           "tokens with mask 1 in the row's whole trajectory"),
    Column("uid", OBJECT, "str", None, "dataset", ("generate", "advantage", "metrics", "dump"),
           "id of the prompt: rows with the same uid are a group"),
    Column("sample_index", OBJECT, "int", None, "trainer", ("generate", "dump"),
           "number of the response among those to its prompt"),
    Column("do_sample", OBJECT, "bool", None, "trainer", ("generate", "dump"), "False: greedy decoding"),
    Column("max_new_tokens", OBJECT, "int, list", None, _DATA, ("generate", "dump"),
           "token limit of this row, or a list with one for each of its responses"),
    Column("trajectory", OBJECT, "str", None, "rollout", ("correction", "advantage", "metrics", "dump"),
           "id of the response: rows with the same id are its parts, in order"),
    Column("finish_reason", OBJECT, "str", None, "rollout", ("advantage", "metrics", "dump"),
           "why the row ended: stop, length or abort"),
    Column("num_turns", OBJECT, "int", None, "rollout", ("metrics", "dump"),
           "number of turns of the trajectory (agents)"),
    Column("agent_metrics", OBJECT, "dict", None, "rollout", ("reward", "metrics", "dump"),
           "status, seconds, calls and failures of the trajectory (agents)"),
    Column("given_score", OBJECT, "float, None", None, "rollout", ("reward",),
           "score set by the agent; None: the reward function scores it"),
    Column("agent_turns", OBJECT, "list", None, "rollout", (),
           "(source, tokens, name, reward) of each turn (agents)"),
    Column("agent_messages", OBJECT, "list, None", None, "rollout", ("reward_model",),
           "the row's conversation with tool calls and tool results (agents, if a reward model scores)"),
    Column("extra_fields", OBJECT, "dict", None, "rollout", (),
           "other fields of the agent's output; in a generated batch separate columns"),
    Column("index", OBJECT, "Any", None, "dataset", ("dump",), "`extra_info.index`, or the row's number in the data"),
    Column("raw_prompt", OBJECT, "list", None, "dataset", ("reward_model",), "the prompt's messages"),
    Column("row", OBJECT, "int", None, "trainer", ("reward",),
           "position in the batch, to look up scores that were computed during generation"),
    Column("scoring_failed", OBJECT, "float", None, "reward", ("dump",), "1: its reward function failed"),
    Column("scoring_error", OBJECT, "str, None", None, "reward", ("dump",), "kind of that error: timeout, raised …"),
    Column("data_source", OBJECT, "str", None, _DATA, ("reward", "dump"), "which reward function scores it"),
    Column("reward_model", OBJECT, "dict", None, _DATA, ("reward", "dump"), "`style` and `ground_truth`"),
    Column("extra_info", OBJECT, "dict", None, _DATA, ("reward", "dump"), "other fields of the data"),
)  # fmt: skip

COLUMNS: Mapping[str, Column] = {column.name: column for column in _TABLE}
RESERVED = frozenset(column.name for column in _TABLE if column.producer != _DATA)
"""Names that a column of the data must not have in a batch."""


@dataclass(frozen=True)
class Alias:
    """Another name for a column, valid while the batch has no column of that name."""

    name: str
    columns: tuple[str, ...]
    """Candidates: the first one that the batch has is read."""
    meaning: str
    entry: str | None = None
    """The entries are dicts: read this key of each. None: read the column itself."""


_ALIASES = (
    Alias("ref_log_probs", ("ref_log_prob",), "the log-probs of the reference policy"),
    Alias(
        "rewards",
        ("token_level_rewards", "token_level_scores"),
        "the rewards; until advantages are computed, the scores",
    ),
    Alias("old_log_probs", ("rollout_log_probs",), "the rollout's log-probs, until the actor has computed its own"),
    Alias("ground_truth", ("reward_model",), "`ground_truth` of each row's `reward_model`", entry="ground_truth"),
)
ALIASES: Mapping[str, Alias] = {alias.name: alias for alias in _ALIASES}


def stored_name(name: str, present: Container[str]) -> str:
    """The stored column that `name` refers to: `name` itself if it is present or has no alias that applies."""
    if name in ALIASES and name not in present:
        return next((column for column in ALIASES[name].columns if column in present), name)
    return name


def columns_read_by(*calls: Call) -> list[str]:
    """Names of the columns that any of these calls reads, where a batch has them."""
    return [column.name for column in _TABLE if set(calls) & set(column.read_by)]


def selected_for(call: Call, present: Iterable[str]) -> list[str]:
    """The columns of a batch that the call reads, plus the user's columns."""
    return [name for name in present if name not in COLUMNS or call in COLUMNS[name].read_by]


def filler(name: str) -> float | None:
    """Padding value of the column; None if it is not fixed by the schema."""
    return COLUMNS[name].filler if name in COLUMNS else None


_PAGE = """# Columns of a batch

<!-- generated by `make docs-pages`; edit the table in verl/types/schema.py instead -->

A batch is a `DataProto`: tensors in `batch`, object arrays in `non_tensor_batch`, one entry per row. B rows have
prompts of P tokens, padded on the left, and responses of R tokens, padded on the right; column t of a [B, R] tensor
belongs to `responses[:, t]`. Padding is not stored: a column that a worker returns is as wide as its longest row,
padded with the value of this table. Other columns, from your data or code, keep their name and stay with their rows. A
reward function gets all object columns, an update all tensors that you added. A column of your data with a name from
this table is renamed to `data_<name>` in a batch, unless its producer in the table is the data.

| column | shape | type | padding | produced by | read by | content |
|---|---|---|---|---|---|---|
"""
_ALIAS_PAGE = """
## Aliases

A column can also be read under these names: `data[name]`, `data.batch[name]`, `data.non_tensor_batch[name]`, their
`get`, `select` and `pop`. An alias is not stored: `keys()` does not contain it. If the batch has a column of that name,
the column is read. Writing to an alias stores a column of that name.

| alias | reads | meaning |
|---|---|---|
"""
_SHAPES = {PROMPT: "[B, P]", RESPONSE: "[B, R]", SEQUENCE: "[B, P+R]", ROW: "[B]", OBJECT: "object"}


def render() -> str:
    """`docs/reference/columns.md`."""
    lines = []
    for column in _TABLE:
        padded = column.axis in (PROMPT, RESPONSE, SEQUENCE)
        padding = ("pad token" if column.filler is None else f"{column.filler:g}") if padded else ""
        cells = (
            _SHAPES[column.axis],
            column.dtype,
            padding,
            column.producer,
            ", ".join(column.read_by),
            column.meaning,
        )
        lines.append(f"| `{column.name}` | {' | '.join(cells)} |\n")
    aliases = [f"| `{a.name}` | {' or '.join(f'`{c}`' for c in a.columns)} | {a.meaning} |\n" for a in _ALIASES]
    return _PAGE + "".join(lines) + _ALIAS_PAGE + "".join(aliases)


if __name__ == "__main__":
    sys.stdout.write(render())
