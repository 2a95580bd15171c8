"""Small recordings with known values for tests of reader, health rules and viewer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.recording import schema
from verl.recording.writer import RecordWriter

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script></script>\x1b[31m\u202e"
GROUPS, ANSWERS, TOKENS = 3, 2, 6
UIDS = ["a" * 32, "b" * 32, "c" * 32]


def open_writer(folder: Path, experiment: str = "run", first_step: int = 0, **config: Any) -> RecordWriter:
    """Begin a recording in `folder/record`."""
    run = {"program": "ppo", "project": "tests", "experiment": experiment, "texts": True, "config": config}
    writer = RecordWriter(folder / schema.FOLDER, run, first_step, run_id="tests")
    writer.event("start" if first_step == 0 else "resume", max(0, first_step - 1), data={"first_step": first_step})
    return writer


def write_run(folder: Path, steps: int = 4, experiment: str = "run", is_ended: bool = True, **config: Any) -> Path:
    """Write a complete run: group 0 has no signal, group 1 has hostile texts, group 2 has an agent with a tool."""
    writer = open_writer(folder, experiment, **config)
    write_vocabulary(writer)
    for step in range(1, steps + 1):
        write_step(writer, step)
    if is_ended:
        writer.event("end", steps)
    close(writer)
    return folder


def write_supervised_run(folder: Path, steps: int = 2, streams: Sequence[str] = ("rows", "pairs")) -> Path:
    """Write two rows and two pairs per step. The first have hostile texts; those of the second are over the budget."""
    writer = open_writer(folder, "supervised")
    write_vocabulary(writer)
    numbers = {"uid": UIDS[:2], "recorded": [True, False]}
    for step in range(1, steps + 1):
        turns = [
            {"source": "model", "name": None, "tokens": 1, "text": "a needle", "reward": None},
            {"source": "environment", "name": None, "tokens": 1, "text": HOSTILE, "reward": None},
        ]
        rows = {"step": [step] * 2, **numbers, "tokens": [3, 3], "trained_tokens": [1, 0], "loss": [1.0, None]}
        rows |= {"prompt": [HOSTILE, None], "turns": [turns, None], "prompt_ids": [[1], None]}
        rows |= {"token_ids": [[3, 4], None], "mask": [[1, 0], None], "trainer_log_probs": [[-1.0, np.nan], None]}
        pairs = {"step": [step] * 2, **numbers, "chosen_score": [1.0, 0.0], "rejected_score": [0.5, 0.0]}
        pairs |= {"margin": [0.5, None], "correct": [True, None], "loss": [0.4, 0.7], "preference": [1.0, 0.5]}
        pairs |= {"prompt": ["which?", None], "chosen": [HOSTILE, None], "rejected": ["no", None]}
        columns = {"rows": rows, "pairs": pairs}
        for stream in streams:
            writer.submit(partial(writer.write_table, stream, step, columns[stream]), step=None)
    close(writer)
    return folder


def write_vocabulary(writer: RecordWriter) -> None:
    texts = [f" w{number}" for number in range(20)]
    rows = {"id": list(range(20)), "piece": texts, "text": texts, "special": [False] * 20}
    writer.submit(lambda: writer.write_tokens(rows), step=None)


def write_step(writer: RecordWriter, step: int, metrics: dict[str, float] | None = None) -> None:
    """Record one step, which takes 10 s: metrics, phases of two ranks, groups, answers, validation of even steps."""
    start = 1000.0 + 10 * step
    data = {"reward/mean": 0.1 * step, "actor/entropy": 1.0, "timing_s/step": 10.0, "timing_s/gen": 6.0}
    data |= {"perf/total_num_tokens": 100.0, "response_length/mean": float(TOKENS)}
    if step % 2 == 0:
        data |= {"val-core/math/acc/mean@1": 0.5, "val-aux/math/acc/mean@1/low": 0.4}
        data |= {"val-aux/math/acc/mean@1/high": 0.6, "val/math/accuracy": 0.5}
        writer.submit(lambda: writer.write_table("validation", step, _validation(step)), step=None)
    writer.line("metrics", {"step": step, "time": start + 10, "data": data | (metrics or {})})
    spans = [("controller", "step", 0, 10), ("controller", "gen", 0, 6), ("actor/0", "update", 6, 9)]
    for track, phase, begin, end in [*spans, ("actor/1", "update", 6, 7), ("engine/0", "generating", 0, 5)]:
        phase_span = {"step": step, "track": track, "phase": phase, "host": "h", "pid": 1}
        writer.line("phases", phase_span | {"start": start + begin, "end": start + end})
    writer.line("engines", {"time": start, "engine": "engine/0", "running": 3, "waiting": 0, "kv_used": 0.5})
    writer.submit(lambda: writer.write_table("groups", step, _groups(step)), step=None)
    writer.submit(lambda: writer.write_table("trajectories", step, _trajectories(step)), step=None)


def close(writer: RecordWriter) -> None:
    writer.close()
    writer.raise_error()


def scores() -> np.ndarray:
    """[group, answer]"""
    return np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.5]])


def _groups(step: int) -> dict[str, Any]:
    values = scores()
    return {
        "step": [step] * GROUPS,
        "uid": UIDS,
        "data_source": ["math"] * GROUPS,
        "prompt": ["plain prompt", HOSTILE, "agent prompt"],
        "prompt_tokens": [2] * GROUPS,
        "samples": [[0, 1]] * GROUPS,
        "scores": values.tolist(),
        "lengths": [[TOKENS] * ANSWERS] * GROUPS,
        "turns": [[1, 1], [1, 1], [3, 3]],
        "finish_reasons": [["stop", "stop"], ["length", "stop"], ["stop", "stop"]],
        "statuses": [["finished"] * ANSWERS] * GROUPS,
        "score_mean": values.mean(1).tolist(),
        "score_std": values.std(1).tolist(),
        "length_mean": [float(TOKENS)] * GROUPS,
        "staleness": [0, 1, 0],
        "recorded": [True] * GROUPS,
    }


def _turns(group: int, sample: int) -> list[dict[str, Any]]:
    def turn(source: str, text: str, tokens: int, name: str | None = None) -> dict[str, Any]:
        return {"source": source, "name": name, "tokens": tokens, "text": text, "reward": None}

    if group == 2:
        return [
            turn("model", "call", 2),
            turn("environment", f"result {HOSTILE}", 2, "lookup"),
            turn("model", "end", 2),
        ]
    return [turn("model", HOSTILE if group == 1 else f"answer {sample} says needle", TOKENS)]


def _trajectories(step: int) -> dict[str, Any]:
    places = [(group, sample) for group in range(GROUPS) for sample in range(ANSWERS)]
    mask = [[1, 1, 0, 0, 1, 1] if group == 2 else [1] * TOKENS for group, _ in places]
    rollout = [-0.5, -1.0, -1.5, -2.0, float("nan"), -0.125]
    count = len(places)
    return {
        "step": [step] * count,
        "uid": [UIDS[group] for group, _ in places],
        "sample_index": [sample for _, sample in places],
        "part": [0] * count,
        "data_source": ["math"] * count,
        "prompt": [["plain prompt", HOSTILE, "agent prompt"][group] for group, _ in places],
        "turns": [_turns(group, sample) for group, sample in places],
        "prompt_ids": [[1, 2]] * count,
        "token_ids": [[3, 4, 5, 6, -1, 8]] * count,
        "mask": mask,
        "rollout_log_probs": [rollout] * count,
        "trainer_log_probs": [[-0.25] * TOKENS] * count,
        "advantages": [[1.0] * TOKENS] * count,
        "versions": [[step - 1] * TOKENS] * count,
        "score": [float(scores()[place]) for place in places],
        "rewards": [{"acc": float(scores()[place])} for place in places],
        "ground_truth": ["42"] * count,
        "finish_reason": ["stop"] * count,
        "status": ["finished"] * count,
        "agent": ['{"tool_calls": 2, "tool_s": 0.123456, "error": null, "tools": {}}'] * count,
        "extra": ["not JSON, <b>markup</b>"] * count,
    }


def _validation(step: int) -> dict[str, Any]:
    """Prompt 0 is always correct, prompt 1 becomes correct at step 4, prompt 2 becomes wrong at step 4."""
    correct = [True, step >= 4, step < 4]
    return {
        "step": [step] * 3,
        "uid": UIDS,
        "sample_index": [0] * 3,
        "data_source": ["math"] * 3,
        "prompt": ["first", HOSTILE, "third"],
        "response": [f"answer of step {step}", HOSTILE, "text"],
        "score": [float(value) for value in correct],
        "correct": correct,
        "ground_truth": ["42"] * 3,
        "length": [5] * 3,
        "finish_reason": ["stop"] * 3,
        "status": ["finished"] * 3,
    }
