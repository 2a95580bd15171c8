"""Write a recording of realistic size, and measure how long it takes to open it and to read one step.

    python benchmarks/recording.py [FOLDER] [--steps 100] [--groups 128] [--answers 8] [--tokens 400] [--seed 0]

The recording (`FOLDER/record`) has all streams: metrics with a learning curve, phases of 8 ranks, engine and device
series, groups, trajectories with texts and log-probs, validation responses every 20 steps, a restart in the middle of
the run. It is written with the writer of training runs. `--measure` reads an existing recording. Tests of the viewer
use `write_recording`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _report import report

from verl import recording
from verl.recording import schema
from verl.recording.writer import RecordWriter

_WORDS = ("we", "have", "the", "number", "of", "apples", "is", "so", "that", "equals", "add", "then", "left", "answer")
_RANKS = 8
_STEP_S = 30.0
_PHASES = {"update_weights": 1.0, "gen": 16.0, "reward": 0.5, "old_log_prob": 3.0, "adv": 0.2, "update_actor": 9.0}
_pending = threading.BoundedSemaphore(2)
_METHODS = {
    "update_weights": "update_rollout_weights",
    "old_log_prob": "compute_log_prob",
    "update_actor": "update_actor",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/recording"))
    for name, default in (("steps", 100), ("groups", 128), ("answers", 8), ("tokens", 400), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--measure", action="store_true", help="only read the recording in FOLDER")
    options = parser.parse_args()
    if not options.measure:
        seconds = write_recording(
            options.folder, options.steps, options.groups, options.answers, options.tokens, options.seed
        )
        print(f"written in {seconds:.0f} s")
    report("Reading a recording", measure(options.folder))


def write_recording(
    folder: Path, steps: int, groups: int = 128, answers: int = 8, tokens: int = 400, seed: int = 0
) -> float:
    """Write `folder/record`; return the seconds it took. `tokens`: mean length of a response."""
    begin, rng = time.perf_counter(), np.random.default_rng(seed)
    texts = _Texts(rng)
    restart = steps // 2 + 1
    writer = _open(folder, 0, groups, answers)
    for step in range(1, steps + 1):
        if step == restart and steps > 1:
            writer.event("end", step, "WorkerDiedError: actor_rollout rank 3 died")
            writer.close()
            writer = _open(folder, restart, groups, answers)
        _write_lines(writer, step, steps, groups * answers, rng)
        columns = _step_columns(step, steps, groups, answers, tokens, rng, texts)
        for stream, rows in columns.items():
            _submit(writer, partial(writer.write_table, stream, step, rows))
        if step % 20 == 0 or step == 1:
            rows = _validation_columns(step, steps, rng, texts)
            _submit(writer, partial(writer.write_table, "validation", step, rows))
    _submit(writer, partial(writer.write_tokens, texts.vocabulary()))
    writer.event("end", steps)
    writer.close(600)
    writer.raise_error()
    return time.perf_counter() - begin


def measure(folder: Path) -> list[dict[str, Any]]:
    """Seconds to open the recording and to read parts of it, and the peak memory of this process."""
    rows = []

    def timed(label: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        rows.append({"query": label, "seconds": round(time.perf_counter() - begin, 3)})
        return result

    run = timed("open", lambda: recording.read(folder))
    metrics = timed("all metrics", run.metrics.table)
    timed("all phases", run.phases.table)
    timed("events, engines, devices", lambda: [run.events.table(), run.engines.table(), run.devices.table()])
    steps = timed("list of steps", lambda: run.trajectories.steps)
    step = steps[len(steps) // 2]
    groups = timed("groups of a step", lambda: run.groups.table(step=step))
    uid = groups["uid"][len(groups) // 2].as_py()
    timed("answers of a group, all fields", lambda: run.trajectories.table(step=step, uid=uid))
    timed("texts of a step", lambda: run.trajectories.table(["uid", "prompt", "turns"], step=step))
    timed("a whole step", lambda: run.trajectories.table(step=step))
    timed("validation of a step", lambda: run.validation.table(step=run.validation.steps[-1]))
    timed("groups of all steps, 3 fields", lambda: run.groups.table(["step", "score_mean", "score_std"]))
    size = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    rows.append({"query": f"{len(metrics)} steps, GB on disk", "seconds": round(size / 1e9, 3)})
    rows.append({"query": "peak memory, MB", "seconds": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024})
    return rows


def _submit(writer: RecordWriter, job: Callable[[], None]) -> None:
    """Run the job in the writer's thread. Waits while two earlier jobs are pending, so that no step is skipped."""
    _pending.acquire()

    def run() -> None:
        try:
            job()
        finally:
            _pending.release()

    writer.submit(run, step=None)


class _Texts:
    """Random texts of a vocabulary of words, with their token ids (one token per word)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._words = np.array([f" {word}{index}" if index else f" {word}" for index in range(200) for word in _WORDS])

    def ids(self, count: int) -> np.ndarray:
        """Token ids with Zipf-like frequencies: few tokens are frequent, as in natural language."""
        return np.minimum(self._rng.zipf(1.4, count) - 1, len(self._words) - 1).astype(np.int32)

    def text(self, ids: np.ndarray) -> str:
        return "".join(self._words[ids])

    def vocabulary(self) -> dict[str, list[Any]]:
        words = self._words.tolist()
        pieces = [word.replace(" ", "Ġ") for word in words]
        return {"id": list(range(len(words))), "piece": pieces, "text": words, "special": [False] * len(words)}


def _open(folder: Path, first_step: int, groups: int, answers: int) -> RecordWriter:
    config = {"data": {"train_batch_size": groups}, "actor_rollout_ref": {"rollout": {"n": answers}}}
    run = {"program": "ppo", "project": "benchmark", "experiment": folder.name, "texts": True, "config": config}
    writer = RecordWriter(folder / schema.FOLDER, run, first_step, run_id="benchmark")
    kind = "start" if first_step == 0 else "resume"
    writer.event(kind, max(0, first_step - 1), data={"first_step": first_step, "host": "node0", "pid": 1})
    return writer


def _write_lines(writer: RecordWriter, step: int, steps: int, answers: int, rng: np.random.Generator) -> None:
    progress, start = step / steps, step * _STEP_S
    noise = rng.standard_normal(200)
    data = {f"metric_{number}/value": float(value) for number, value in enumerate(noise[:120])}
    data |= {
        "training/global_step": step,
        "reward/mean": 0.2 + 0.6 * progress + 0.02 * noise[120],
        "critic/score/mean": 0.2 + 0.6 * progress + 0.02 * noise[120],
        "response_length/mean": 300 + 200 * progress + 10 * noise[121],
        "response_length/clip_ratio": 0.05,
        "actor/entropy": 1.2 - 0.8 * progress + 0.01 * noise[122],
        "actor/grad_norm": abs(0.5 + 0.1 * noise[123]),
        "actor/pg_clipfrac": abs(0.01 * noise[124]),
        "kl/mean": 0.02 * progress,
        "rollout/log_prob_diff_mean": 0.01 + 0.001 * noise[125],
        "timing_s/step": sum(_PHASES.values()),
        **{f"timing_s/{name}": seconds for name, seconds in _PHASES.items()},
        "perf/total_num_tokens": answers * 500.0,
    }
    if step % 20 == 0:
        accuracy = 0.3 + 0.4 * progress
        data |= {"val/math/accuracy": accuracy, "val-core/math/acc/mean@1": accuracy}
        data |= {"val-core/math/acc/mean@1/low": accuracy - 0.03, "val-core/math/acc/mean@1/high": accuracy + 0.03}
    writer.line("metrics", {"step": step, "time": start + _STEP_S, "data": data})
    for name, seconds in _PHASES.items():
        source = {"step": step, "host": "node0", "pid": 1}
        writer.line("phases", source | {"track": "controller", "phase": name, "start": start, "end": start + seconds})
        for rank in range(_RANKS):
            if name in _METHODS:
                track = {"track": f"actor_rollout/{rank}", "phase": _METHODS[name], "pid": 10 + rank}
            elif name == "gen":
                track = {"track": f"engine/{rank}", "phase": "generating", "pid": 10 + rank}
            else:
                continue
            end = start + seconds * float(rng.uniform(0.8, 1.0))
            writer.line("phases", source | track | {"start": round(start, 3), "end": round(end, 3)})
        start += seconds
    for rank in range(_RANKS):
        writer.line(
            "engines",
            {"time": start, "engine": f"engine/{rank}", "running": int(rng.integers(0, 128)), "waiting": 0}
            | {
                "tokens_per_s": float(rng.uniform(2e3, 4e3)),
                "kv_used": float(rng.uniform(0, 1)),
                "weight_version": step,
            },
        )
        writer.line(
            "devices",
            {
                "time": start,
                "device": f"GPU-{rank}",
                "host": "node0",
                "tracks": [f"actor_rollout/{rank}"],
                "name": "H200",
            }
            | {"memory_used": int(rng.uniform(60e9, 120e9)), "memory_total": 141 * 10**9}
            | {"utilization": float(rng.uniform(0.5, 1)), "power": float(rng.uniform(300, 700))},
        )
    if step % 50 == 0:
        writer.event("checkpoint", step, data={"seconds": 12.0, "gigabytes": 28.0, "path": f"global_step_{step}"})


def _step_columns(
    step: int, steps: int, groups: int, answers: int, tokens: int, rng: np.random.Generator, texts: _Texts
) -> dict[str, dict[str, Any]]:
    """Columns of groups and trajectories of a step."""
    count = groups * answers
    lengths = np.clip(rng.gamma(4.0, tokens / 4.0, count), 8, 4 * tokens).astype(np.int64)
    difficulty = np.repeat(rng.uniform(0, 1, groups), answers)
    scores = (rng.uniform(0, 1, count) < 0.8 * (0.3 + 0.7 * step / steps) * (1.4 - difficulty)).astype(float)
    by_group = scores.reshape(groups, answers)
    deviation = by_group.std(1)
    advantage = ((by_group - by_group.mean(1, keepdims=True)) / (deviation[:, None] + 1e-6)).ravel()
    uids = [f"{(step * groups + number) % 7500:032x}" for number in range(groups)]
    prompt_ids = [texts.ids(int(rng.integers(40, 160))) for _ in range(groups)]
    prompts = [texts.text(ids) for ids in prompt_ids]
    ids = texts.ids(int(lengths.sum()))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rollout = -rng.exponential(0.3, len(ids)).astype(np.float32)
    trainer = rollout + 0.01 * rng.standard_normal(len(ids)).astype(np.float32)
    bodies = [texts.text(ids[start:end]) for start, end in itertools.pairwise(offsets)]

    def ragged(values: np.ndarray, kind: pa.DataType) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind), pa.list_(kind))

    reasons = np.where(lengths >= 4 * tokens, "length", "stop")
    token_scores = np.zeros(len(ids), np.float32)
    token_scores[offsets[1:] - 1] = scores
    group_columns: dict[str, Any] = {
        "step": [step] * groups,
        "uid": uids,
        "data_source": ["math"] * groups,
        "prompt": [text[:200] for text in prompts],
        "prompt_tokens": [len(row) for row in prompt_ids],
        "samples": [list(range(answers))] * groups,
        "scores": by_group.tolist(),
        "lengths": lengths.reshape(groups, answers).tolist(),
        "turns": [[1] * answers] * groups,
        "finish_reasons": reasons.reshape(groups, answers).tolist(),
        "statuses": [["finished"] * answers] * groups,
        "score_mean": by_group.mean(1).tolist(),
        "score_std": deviation.tolist(),
        "length_mean": lengths.reshape(groups, answers).mean(1).tolist(),
        "staleness": rng.integers(0, 2, groups).tolist(),
        "recorded": [True] * groups,
    }
    trajectory_columns = {
        "step": [step] * count,
        "uid": [uid for uid in uids for _ in range(answers)],
        "sample_index": list(range(answers)) * groups,
        "part": [0] * count,
        "data_source": ["math"] * count,
        "prompt": [text for text in prompts for _ in range(answers)],
        "prompt_ids": [row for row in prompt_ids for _ in range(answers)],
        "turns": [
            [{"source": "model", "name": None, "tokens": int(length), "text": text, "reward": None}]
            for length, text in zip(lengths, bodies, strict=True)
        ],
        "token_ids": ragged(ids, pa.int32()),
        "mask": ragged(np.ones(len(ids), np.uint8), pa.uint8()),
        "rollout_log_probs": ragged(rollout, pa.float32()),
        "trainer_log_probs": ragged(trainer, pa.float32()),
        "advantages": ragged(np.repeat(advantage, lengths).astype(np.float32), pa.float32()),
        "versions": ragged(np.full(len(ids), step - 1, np.int32), pa.int32()),
        "token_scores": ragged(token_scores, pa.float32()),
        "score": scores.tolist(),
        "rewards": [{"acc": score, "format": 1.0} for score in scores],
        "reward_info": [json.dumps({"pred": str(int(score))}) for score in scores],
        "ground_truth": ["1"] * count,
        "finish_reason": reasons.tolist(),
        "status": ["finished"] * count,
    }
    return {"groups": group_columns, "trajectories": trajectory_columns}


def _validation_columns(
    step: int, steps: int, rng: np.random.Generator, texts: _Texts, count: int = 500
) -> dict[str, Any]:
    correct = rng.uniform(0, 1, count) < 0.3 + 0.4 * step / steps
    prompts = np.random.default_rng(0)  # the same prompts in every validation
    return {
        "step": [step] * count,
        "uid": [f"val{number:029x}" for number in range(count)],
        "sample_index": [0] * count,
        "data_source": ["math"] * count,
        "prompt": [texts.text(prompts.integers(0, 500, 60)) for _ in range(count)],
        "response": [texts.text(texts.ids(200)) for _ in range(count)],
        "score": correct.astype(float).tolist(),
        "correct": correct.tolist(),
        "rewards": [{"acc": float(value)} for value in correct],
        "ground_truth": ["1"] * count,
        "length": [200] * count,
        "finish_reason": ["stop"] * count,
        "status": ["finished"] * count,
    }


if __name__ == "__main__":
    main()
