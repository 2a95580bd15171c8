"""The streams of a recording in one table: files, fields, types, units and meanings.

Writer, reader and `docs/reference/recording.md` (by `docs/scripts/recording_page.py`) are derived from it. Adding a
field or a stream keeps the version; a change that existing readers would misread increments it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pyarrow as pa

from verl.utils.checkpoint.folders import RECORD_FOLDER

VERSION = 2
FORMER_NAMES = {"track": "lane", "tracks": "lanes", "response": "answer"}
"""Fields that had other names in version 1, which the reader still supports: current name → former name."""
FOLDER = RECORD_FOLDER
RUN_FILE, TOKENS_FILE = "run.json", "tokens.parquet"

Layout: TypeAlias = Literal["lines", "steps", "file"]


@dataclass(frozen=True)
class Field:
    """One field. `unit`: empty for counts, names and values without a unit."""

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""


@dataclass(frozen=True)
class StreamSpec:
    """One stream.

    `layout`: `lines` (one JSON object per line, appended to `<name>.jsonl`), `steps` (a parquet file per step in the
    folder `<name>`) or `file` (one parquet file).
    """

    name: str
    layout: Layout
    row: str
    """What one row is."""
    fields: tuple[Field, ...]
    by_step: bool = True
    """Whether a row belongs to a step, and is superseded when a later attempt trains this step again."""

    @property
    def path(self) -> str:
        """File or folder, relative to the recording."""
        return {"lines": f"{self.name}.jsonl", "steps": f"{self.name}/", "file": f"{self.name}.parquet"}[self.layout]


_int, _long, _float, _double, _text, _bool = pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.bool_()
_TIME = "s since 1970"
_step = Field("step", _long, "training step; 0 is the state before training")
_attempt = Field("attempt", _int, "number of the attempt (start of the program) that wrote the row, from 1")
_time = Field("time", _double, "time of the record", _TIME)
_uid = Field("uid", _text, "id of the prompt: depends only on its messages, the same in all runs")
_sample = Field("sample_index", _int, "number of the response among those to its prompt")
_source = Field("data_source", _text, "data source of the prompt")
_truth = Field("ground_truth", _text, "ground truth of the data; JSON if it is not a text")
_rewards = Field("rewards", pa.map_(_text, _double), "numbers that the reward function returned, by name")
_notes = Field(
    "reward_info", _text, "other values that the reward function returned (texts, kind of a scoring error), as JSON"
)
_extra = Field("extra", _text, "further columns of the response, such as columns of the data, as JSON")

_TURN = pa.struct(
    [
        pa.field("source", _text),
        pa.field("name", _text),
        pa.field("tokens", _int),
        pa.field("text", _text),
        pa.field("reward", _double),
    ]
)

_STREAMS = (
    StreamSpec(
        "metrics",
        "lines",
        "the metrics of one step",
        (
            _step,
            _time,
            _attempt,
            Field("data", pa.map_(_text, _double), "metrics by name; `table()` returns a column per metric instead"),
        ),
    ),
    StreamSpec(
        "phases",
        "lines",
        "one phase of the controller, or one call of a rank",
        (
            _step,
            _attempt,
            Field("track", _text, "`controller`, role and rank of a process (`actor_rollout/0`), or `engine/0`"),
            Field("phase", _text, "name of the phase (controller), of the method (rank), or `generating` (engine)"),
            Field("start", _double, "begin, by the clock of its host", _TIME),
            Field("end", _double, "end, by the clock of its host", _TIME),
            Field("host", _text, "name of the host"),
            Field("pid", _long, "process id: tracks with the same host and pid share a process"),
        ),
        by_step=False,
    ),
    StreamSpec(
        "engines",
        "lines",
        "the load of one inference engine at one time",
        (
            _time,
            _attempt,
            Field("engine", _text, "track of the engine in `phases`: `engine/0`, by the rank that leads it"),
            Field("running", _int, "requests that have their first token and are not finished"),
            Field("waiting", _int, "requests without a token yet"),
            Field("tokens_per_s", _double, "sampled tokens since the previous record", "tokens / s"),
            Field("kv_used", _double, "share of the KV cache that holds tokens of unfinished requests", "0 to 1"),
            Field("preemptions", _int, "requests preempted since the previous record, because the cache was full"),
            Field("kv_bytes", _long, "memory of the KV cache; 0 while it is released", "bytes"),
            Field("weight_version", _long, "version of the weights"),
        ),
        by_step=False,
    ),
    StreamSpec(
        "devices",
        "lines",
        "one device at one time",
        (
            _time,
            _attempt,
            Field("device", _text, "UUID of the GPU"),
            Field("host", _text, "name of the host"),
            Field("tracks", pa.list_(_text), "ranks that use it"),
            Field("name", _text, "product name"),
            Field("memory_used", _long, "memory in use, by all processes", "bytes"),
            Field("memory_total", _long, "memory of the device", "bytes"),
            Field("memory_tensors", _long, "memory that torch has allocated in the processes of the run", "bytes"),
            Field("utilization", _double, "share of the time in which a kernel was running", "0 to 1"),
            Field("power", _double, "power draw", "W"),
        ),
        by_step=False,
    ),
    StreamSpec(
        "events",
        "lines",
        "one event",
        (
            _time,
            _attempt,
            _step,
            Field("kind", _text, "see the list of kinds"),
            Field("message", _text, "one sentence; without texts (record.texts=False) the unformatted log message"),
            Field("data", _text, "further values, as JSON"),
        ),
        by_step=False,
    ),
    StreamSpec(
        "groups",
        "steps",
        "one prompt of a training step, with all its responses",
        (
            _step,
            _uid,
            _source,
            Field("prompt", _text, "first 200 characters of the prompt"),
            Field("prompt_tokens", _int, "length of the prompt", "tokens"),
            Field("samples", pa.list_(_int), "`sample_index` of each response, in the order of the other lists"),
            Field("scores", pa.list_(_double), "score of each response; null: could not be scored"),
            Field("lengths", pa.list_(_int), "tokens of each response, including those of tools", "tokens"),
            Field("turns", pa.list_(_int), "turns of each response"),
            Field("finish_reasons", pa.list_(_text), "why each response ended: stop, length or abort"),
            Field("statuses", pa.list_(_text), "status of each response: finished, aborted or failed (agents)"),
            Field("score_mean", _double, "mean score"),
            Field("score_std", _double, "standard deviation of the scores (divided by n); 0: no signal"),
            Field("length_mean", _double, "mean of `lengths`", "tokens"),
            Field("staleness", _int, "version of the trainer minus the oldest version that sampled a token", "steps"),
            Field("recorded", _bool, "whether its responses are in `trajectories`; false: beyond the step's budget"),
        ),
    ),
    StreamSpec(
        "trajectories",
        "steps",
        "one row of a response; agents that rewrite their context have several rows per response",
        (
            _step,
            _uid,
            _sample,
            Field("part", _int, "number of the row among those of the response, from 0"),
            _source,
            Field("prompt", _text, "text of the prompt, without special tokens"),
            Field("messages", _text, "messages of the conversation as JSON, if the data or the agent provides them"),
            Field("turns", pa.list_(_TURN), "the response in order: source (model, environment), name (of the tool),"
                  " number of tokens, text without special tokens, reward"),
            Field("prompt_ids", pa.list_(_int), "token ids of the prompt; -1: redacted"),
            Field("token_ids", pa.list_(_int), "token ids of the response; -1: redacted"),
            Field("mask", pa.list_(pa.uint8()), "1 on tokens that are trained on"),
            Field("rollout_log_probs", pa.list_(_float), "log-probs from the engine; NaN: unknown", "nats"),
            Field("trainer_log_probs", pa.list_(_float), "log-probs of the policy before its update", "nats"),
            Field("ref_log_probs", pa.list_(_float), "log-probs of the reference policy", "nats"),
            Field("teacher_log_probs", pa.list_(_float), "log-probs of the teacher, with distillation", "nats"),
            Field("entropy", pa.list_(_float), "entropy of the policy at each token", "nats"),
            Field("values", pa.list_(_float), "values of the critic"),
            Field("advantages", pa.list_(_float), "advantages of the policy loss"),
            Field("weights", pa.list_(_float), "importance weights of the rollout correction"),
            Field("versions", pa.list_(_int), "weight version that sampled each token; -1: not sampled or unknown"),
            Field("token_scores", pa.list_(_float), "score of the response, on its last token, plus turn rewards, each"
                  " on the last token of its turn"),
            Field("score", _double, "score of the response: sum of its `token_scores`"),
            _rewards,
            _notes,
            _truth,
            Field("finish_reason", _text, "why the row ended: stop, length or abort"),
            Field("status", _text, "finished, aborted or failed (agents)"),
            Field("agent", _text, "seconds, calls, failures and error of the agent, as JSON"),
            _extra,
        ),
    ),
    StreamSpec(
        "rows",
        "steps",
        "one row of a training batch of verl sft",
        (
            _step,
            Field("uid", _text, "id of the row: depends only on its tokens, the same in all runs"),
            Field("tokens", _int, "length of the row", "tokens"),
            Field("trained_tokens", _int, "tokens that are trained on", "tokens"),
            Field("loss", _double, "mean of -log-prob over the trained tokens, weighted by `loss_weights`, before the"
                  " update; null: no token is trained", "nats"),
            Field("recorded", _bool, "whether the fields below are recorded; false: beyond the budget of the step"),
            Field("prompt", _text, "text before the first trained token, without special tokens"),
            Field("turns", pa.list_(_TURN), "the rest in order: source (model: trained, environment: not trained),"
                  " number of tokens, text without special tokens"),
            Field("prompt_ids", pa.list_(_int), "token ids before the first trained token; -1: redacted"),
            Field("token_ids", pa.list_(_int), "token ids of the rest; -1: redacted"),
            Field("mask", pa.list_(pa.uint8()), "1 on tokens of the rest that are trained on"),
            Field("loss_weights", pa.list_(_float), "weights of these tokens in the loss, if the data has weights"),
            Field("trainer_log_probs", pa.list_(_float), "log-probs of the model before the update", "nats"),
        ),
    ),
    StreamSpec(
        "pairs",
        "steps",
        "one pair of a training batch of verl rm",
        (
            _step,
            Field("uid", _text, "id of the pair: depends only on its tokens, the same in all runs"),
            Field("chosen_score", _double, "score of the chosen response, before the update"),
            Field("rejected_score", _double, "score of the rejected response, before the update"),
            Field("margin", _double, "score of the better response minus that of the other; null: a tie"),
            Field("correct", _bool, "whether the better response has the higher score; null: a tie, or equal scores"),
            Field("loss", _double, "loss of the pair, without its weight", "nats"),
            Field("preference", _double, "probability that `chosen` is the better one; 0.5: a tie", "0 to 1"),
            Field("required_margin", _double, "margin of the data, which the loss subtracts"),
            Field("weight", _double, "weight of the pair in the loss"),
            Field("prompt_tokens", _int, "length of the prompt", "tokens"),
            Field("chosen_tokens", _int, "length of the chosen response", "tokens"),
            Field("rejected_tokens", _int, "length of the rejected response", "tokens"),
            Field("recorded", _bool, "whether the fields below are recorded; false: beyond the budget of the step"),
            Field("prompt", _text, "text of the prompt, without special tokens"),
            Field("chosen", _text, "text of the chosen response, without special tokens"),
            Field("rejected", _text, "text of the rejected response, without special tokens"),
            Field("prompt_ids", pa.list_(_int), "token ids of the prompt; -1: redacted"),
            Field("chosen_ids", pa.list_(_int), "token ids of the chosen response; -1: redacted"),
            Field("rejected_ids", pa.list_(_int), "token ids of the rejected response; -1: redacted"),
        ),
    ),
    StreamSpec(
        "validation",
        "steps",
        "one response to a validation prompt; of verl rm a validation pair, of verl sft a validation row, unless"
        " data.val_prompt_files is set",
        (
            _step,
            _uid,
            _sample,
            _source,
            Field("prompt", _text, "text of the prompt, without special tokens"),
            Field("response", _text, "text of the (last) response, without special tokens; of a pair the chosen one"),
            Field("turns", pa.list_(_TURN), "turns of agents: source, name, number of tokens, text, reward; of"
                  " a pair both responses"),
            Field("score", _double, "score; null: could not be scored; of a pair its margin, of a row the mean log-prob"
                  " of its trained tokens"),
            Field("correct", _bool, "whether it counts as correct in `val/<source>/accuracy`; null: left out"),
            _rewards,
            _notes,
            _truth,
            Field("length", _int, "tokens of the response", "tokens"),
            Field("finish_reason", _text, "why it ended: stop, length or abort"),
            Field("status", _text, "finished, aborted or failed (agents)"),
        ),
    ),
    StreamSpec(
        "tokens",
        "file",
        "one token of the vocabulary",
        (
            Field("id", _int, "token id"),
            Field("piece", _text, "the tokenizer's own notation, which marks spaces (`Ġthe`, `▁the`)"),
            Field("text", _text, "text of the token alone; incomplete characters are `�`"),
            Field("special", _bool, "whether it is a special token"),
        ),
        by_step=False,
    ),
)  # fmt: skip

STREAMS: dict[str, StreamSpec] = {stream.name: stream for stream in _STREAMS}

EVENTS: dict[str, str] = {
    "start": "the program started at step 0; `data`: first_step, host, pid, versions",
    "resume": "the program resumed from a checkpoint; `data`: first_step, folder",
    "restart": "the supervisor restarted the program; `message`: cause",
    "recovery": "lost workers were restarted in place; `message`: cause",
    "memory_plan": "planned memory; `data`: gb (tensors per device by phase, as memory_gb/*), device_gb",
    "checkpoint": "a checkpoint is complete; `data`: seconds, gigabytes, path",
    "dropped_groups": "groups that were not trained; `data`: number by reason",
    "failed_rewards": "responses that could not be scored; `data`: number by kind",
    "failed": "a save, validation or dump failed, and training continued; `data`: number by kind",
    "warning": "a warning or an error of the log; at most 20 per kind of message",
    "sampled": "a step had more data than record.max_mb_per_step; `data`: groups (or rows, pairs), recorded, seed",
    "skipped": "samples of a step were not recorded, because the writer had not finished earlier steps",
    "dropped_records": "records were lost, because the writer could not keep up; `data`: number by stream",
    "deleted_steps": "files of steps were deleted to stay within record.max_gb; `data`: stream, steps",
    "stopped": "only metrics and events are recorded from now on: the small streams alone exceed record.max_gb",
    "end": "the program ended; `message`: the error, if there is one",
}
"""Kinds of events."""


@functools.cache
def arrow_schema(stream: str) -> pa.Schema:
    """The Arrow schema of a stream's rows."""
    return pa.schema([(field.name, field.type) for field in STREAMS[stream].fields])


def step_file(stream: str, step: int) -> str:
    """File of a step, relative to the recording. Names sort by step."""
    return f"{stream}/{step:08d}.parquet"


def step_of_file(name: str) -> int | None:
    """The step of a file of `step_file` by its name; None for other files."""
    stem, _, suffix = name.rpartition(".")
    return int(stem) if suffix == "parquet" and stem.isdecimal() and len(stem) >= 8 else None
