"""Rows of the recording from a validation: the responses to its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.recording.redaction import Redaction
from verl.recording.sampling import groups_within
from verl.recording.writer import RecordWriter
from verl.trainer.common.dumps import plain_value
from verl.trainer.ppo.recorded_rows import FINISHED, RowOptions, as_texts, is_number, json_text
from verl.workers.reward_manager.naive import FAILED_COLUMN

__all__ = ["record_validation"]


def record_validation(
    samples: Mapping[str, Sequence[Any]], step: int, options: RowOptions, writer: RecordWriter
) -> None:
    """Write the scored responses to the validation prompts; a sample of the prompts if they exceed the budget."""
    numbers: dict[str, list[int]] = {}
    for index, uid in enumerate(samples["uid"]):
        numbers.setdefault(str(uid), []).append(index)
    sizes = [len(samples["prompt"][i]) + len(samples["answer"][i]) for i in range(len(samples["uid"]))]
    groups = list(numbers.values())
    # The same seed in all steps: the same prompts are recorded over time.
    chosen = groups_within([sum(sizes[i] for i in group) for group in groups], options.max_bytes, seed=0)
    rows = [i for number in chosen for i in groups[number]]
    sample = {"groups": len(groups), "recorded": len(chosen), "seed": 0}
    if len(chosen) < len(groups):
        writer.event("sampled", step, data=sample | {"stream": "validation"})
    if rows:
        selected = {name: [values[i] for i in rows] for name, values in samples.items()}
        writer.write_table("validation", step, validation_columns(selected, step, options), sample)


def validation_columns(samples: Mapping[str, Sequence[Any]], step: int, options: RowOptions) -> dict[str, list[Any]]:
    """Columns of the stream `validation`. `samples`: see `Validator`; columns that it lacks are null."""
    count, redact = len(samples["uid"]), options.redaction
    described = {*("prompt", "answer", "gts", "more", "uid", "data_source", "answer_score", "correct"),
                 *("length", "finish_reason", "sample_index", "reward")}  # fmt: skip
    names = [name for name in samples if name not in described and name != FAILED_COLUMN]
    values = [{name: plain_value(samples[name][i]) for name in names} for i in range(count)]
    columns: dict[str, list[Any]] = {
        "step": [step] * count,
        "uid": [str(uid) for uid in samples["uid"]],
        "data_source": as_texts(samples["data_source"]),
        "score": [plain_value(value) for value in samples["reward"]],
        "rewards": [{name: value for name, value in row.items() if is_number(value)} for row in values],
    }
    for name in ("correct", "length", "finish_reason", "sample_index"):
        if name in samples:
            columns[name] = [plain_value(value) for value in samples[name]]
    more = samples.get("more", [{}] * count)
    columns["status"] = [item.get("status", FINISHED) for item in more]
    if options.texts:
        columns |= {
            "prompt": [redact.text(text) for text in samples["prompt"]],
            "response": [redact.text(text) for text in samples["answer"]],
            "turns": [_dumped_turns(item.get("turns"), redact) for item in more],
            "ground_truth": [
                redact.text(truth) if isinstance(truth, str) else json_text(truth, redact) for truth in samples["gts"]
            ],
            "reward_info": [
                json_text({k: v for k, v in row.items() if v is not None and not is_number(v)}, redact)
                for row in values
            ],
        }
    return columns


def _dumped_turns(turns: Sequence[Mapping[str, Any]] | None, redact: Redaction) -> list[dict[str, Any]] | None:
    if turns is None:
        return None
    return [
        {
            "source": "model" if turn["by"] == "model" else "environment",
            "name": None if turn["by"] in ("model", "environment") else turn["by"],
            "text": redact.text(turn["text"]),
            "reward": turn.get("reward"),
        }
        for turn in turns
    ]
