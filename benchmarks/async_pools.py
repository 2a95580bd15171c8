"""Pool sizes and speed-up of asynchronous training: the real buffer and admission control on a virtual clock.

    python benchmarks/async_pools.py                                    # the tables of docs/results.md
    python benchmarks/async_pools.py --ranks 16 --staleness 4 --lengths mine.json
    python benchmarks/async_pools.py --count answers.parquet --tokenizer MODEL > mine.json

Device costs (`--costs`) and response lengths (`--lengths`, files of benchmarks/traces) are measured; the batch size is
proportional to the number of devices. Synchronous: all devices generate, wait for the longest response, then train.
Asynchronous: some devices generate and the others train, with an additional pass for old log-probs. `bound`: every
device always busy, decoding at full load. `--tail` draws lengths from a lognormal distribution truncated at this
multiple of the mean. Scaling losses of larger groups of ranks are not modelled.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _pool_clock import Costs, Pool
from _report import report

from verl.trainer.asynchronous.rollout_buffer import PromptGroup, RolloutBuffer
from verl.trainer.asynchronous.utilization import AsyncSetup, Utilization, tuning_advice

TRACES = Path(__file__).parent / "traces"
COSTS = TRACES / "qwen2.5-0.5b_h200.json"
LENGTHS = sorted(TRACES.glob("answers_*.json"))
PROMPT_TOKENS = 128
# Interval in which the controller collects finished groups.
COLLECT_S = 0.05


@dataclass(frozen=True)
class Work:
    """`prompts` per device and step, each with one response per length."""

    prompts: int
    lengths: list[list[int]]
    name: str
    seed: int = 7

    @classmethod
    def lognormal(cls, prompts: int, n: int, mean: int, longest: int, sigma: float) -> Work:
        """Lognormal lengths with this mean, truncated at `longest`."""
        rng = random.Random(11)
        shares = [rng.lognormvariate(0.0, sigma) for _ in range(4096 * n)]
        low, high = 0.0, float(longest)
        for _ in range(50):  # the scale at which the truncated lengths have this mean
            scale = (low + high) / 2
            average = sum(min(share * scale, longest) for share in shares) / len(shares)
            low, high = (scale, high) if average < mean else (low, scale)
        cut = [max(1, min(round(share * scale), longest)) for share in shares]
        groups = [cut[start : start + n] for start in range(0, len(cut), n)]
        return cls(prompts, groups, f"lognormal, truncated at {longest / mean:.0f} x mean")

    @property
    def mean(self) -> float:
        return sum(map(sum, self.lengths)) / sum(map(len, self.lengths))

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    def stream(self) -> Iterator[list[int]]:
        """An infinite stream of prompts in a seeded order."""
        rng = random.Random(self.seed)
        while True:
            yield from rng.sample(self.lengths, len(self.lengths))


@dataclass
class Result:
    """Results of a run after its warm-up."""

    samples_per_s: float
    trainer_idle: float = 0.0
    rollout_idle: float = 0.0
    staleness: float = 0.0
    dropped: int = 0
    advice: str = ""


def synchronous(work: Work, costs: Costs, ranks: int, steps: int, slots: int) -> Result:
    """All ranks generate, then all train."""
    now, samples, idle_seconds, prompts = 0.0, 0, 0.0, work.stream()
    for _ in range(steps):
        pool, groups = Pool(costs, ranks, slots), [next(prompts) for _ in range(work.prompts * ranks)]
        step_begin = now = now + costs.weight_sync_s
        pool.add([(tokens, None) for group in groups for tokens in group], now)
        while pool.next_end() < math.inf:
            now = pool.finish()[0]
        idle_seconds += now - step_begin
        tokens = sum(map(sum, groups)) + PROMPT_TOKENS * sum(map(len, groups))
        now += tokens / (costs.update_tokens_per_s * ranks) + costs.step_overhead_s
        samples += sum(map(len, groups))
    return Result(samples / now, trainer_idle=idle_seconds / now)


class Asynchronous:
    """`rollout` ranks generate continuously, `training` ranks take batches from the buffer."""

    def __init__(
        self, work: Work, costs: Costs, rollout: int, training: int, staleness: int, slots: int, mode: str = "async"
    ) -> None:
        self._work, self._costs, self._training, self._mode, self._staleness = work, costs, training, mode, staleness
        self._pool = Pool(costs, rollout, slots)
        in_order = mode == "one_step_off"
        self._buffer = RolloutBuffer(work.prompts * (rollout + training), staleness, "wait", in_order)
        self._prompts = work.stream()
        self._now = 0.0
        self._serial = -1
        self._unfinished: dict[int, int] = {}
        self._max_concurrent = rollout * slots
        self._utilization = self._new_utilization()

    def run(self, steps: int, warm_up: int) -> Result:
        samples, step_begin, ages = 0, 0.0, []
        for version in range(warm_up + steps):
            if version == warm_up:
                step_begin, self._utilization = self._now, self._new_utilization()
                self._utilization.set_in_flight(self._pool.load)
            batch, seconds = self._step(version)
            if version >= warm_up:
                self._utilization.step(seconds)
                samples += sum(group.response_count for group in batch)
                ages.append(self._buffer.metrics(version)["async/staleness/mean"])
        shares = self._utilization.shares()
        assert shares is not None
        setup = AsyncSetup(
            self._mode,
            self._staleness,
            self._mode == "async",
            own_devices=True,
            trained_staleness=self._buffer.max_trained_staleness,
        )
        return Result(
            samples / (self._now - step_begin),
            shares.trainer,
            shares.rollout,
            sum(ages) / len(ages),
            sum(value for name, value in self._buffer.counts.items() if name.startswith("dropped")),
            tuning_advice(shares, setup),
        )

    def _new_utilization(self) -> Utilization:
        return Utilization(lambda: self._now, self._max_concurrent)

    def _step(self, version: int) -> tuple[list[PromptGroup], dict[str, float]]:
        step_begin = self._now
        if self._mode == "one_step_off":  # in-flight responses finish with the weights they started with
            while self._pool.load:
                self._finish(version - 1)
        self._pool.pause(self._now, self._costs.weight_sync_s)
        self._now += self._costs.weight_sync_s
        assert not self._buffer.drop_stale(version), "nothing is dropped with the strategy 'wait'"
        self._send(version)
        waiting = self._now
        while (batch := self._buffer.take(version)) is None:
            until = max(self._now + COLLECT_S, self._pool.next_end())
            while self._pool.next_end() <= until:
                self._finish(version)
            self._now = until
        tokens = sum(sum(group.state) + PROMPT_TOKENS * group.response_count for group in batch)
        costs, trained = self._costs, self._now
        update = tokens / (costs.update_tokens_per_s * self._training)
        end = trained + update + tokens / (costs.log_prob_tokens_per_s * self._training) + costs.step_overhead_s
        while self._pool.next_end() <= end:
            self._finish(version)
        self._now = end
        return batch, {"step": end - step_begin, "gen": trained - waiting}

    def _send(self, version: int) -> None:
        responses = []
        for _ in range(self._buffer.capacity(version)):
            self._serial += 1
            lengths = next(self._prompts)
            group = PromptGroup(self._serial, str(self._serial), len(lengths), version, state=lengths)
            self._buffer.add(group)
            self._unfinished[group.serial] = len(lengths)
            responses += [(tokens, group) for tokens in lengths]
        self._pool.add(responses, self._now)
        self._utilization.set_in_flight(self._pool.load)

    def _finish(self, version: int) -> None:
        self._now, group = self._pool.finish()
        self._utilization.set_in_flight(self._pool.load)
        self._unfinished[group.serial] -= 1
        if not self._unfinished[group.serial]:
            del self._unfinished[group.serial]
            self._buffer.mark_finished(group, group.sent_at)


def bound(work: Work, costs: Costs, ranks: int) -> float:
    """Samples per second if no device ever waits: decoding at the largest measured load, then training."""
    load = costs.decode_ms[-1][0]
    tokens = work.mean
    seconds_per_response = tokens * costs.token_s(load) / load + (tokens + PROMPT_TOKENS) / costs.update_tokens_per_s
    return ranks / seconds_per_response


def splits(work: Work, costs: Costs, ranks: int) -> list[int]:
    """Numbers of rollout ranks to try, around the balanced split."""
    load = costs.decode_ms[-1][0]
    answering = work.mean * costs.token_s(load) / load
    training = (work.mean + PROMPT_TOKENS) * (1 / costs.update_tokens_per_s + 1 / costs.log_prob_tokens_per_s)
    even = answering / (answering + training)
    shares = [even * factor for factor in (0.8, 1.0, 1.25, 1.6, 2.0)]
    return sorted({min(ranks - 1, max(1, round(ranks * share))) for share in shares})


def best(
    work: Work, costs: Costs, ranks: int, staleness: int, options: argparse.Namespace, mode: str = "async"
) -> tuple[int, Result]:
    """The split with the highest throughput."""
    results = []
    for rollout in splits(work, costs, ranks):
        run = Asynchronous(work, costs, rollout, ranks - rollout, staleness, options.slots, mode)
        results.append((rollout, run.run(options.steps, warm_up=staleness + 3)))
    return max(results, key=lambda result: result[1].samples_per_s)


def row(work: Work, costs: Costs, ranks: int, staleness: int, options: argparse.Namespace) -> dict[str, Any]:
    sync = synchronous(work, costs, ranks, options.steps, options.slots)
    rollout, result = best(work, costs, ranks, staleness, options)
    _, one_step_off = best(work, costs, ranks, 1, options, "one_step_off")
    limit = bound(work, costs, ranks)
    return {
        "ranks": ranks,
        "lengths": work.name,
        "answers": f"mean {work.mean:.0f}, max {work.longest}",
        "max_staleness": staleness,
        "rollout : trainer": f"{rollout} : {ranks - rollout}",
        "sync samples/s": round(sync.samples_per_s),
        "one_step_off x": round(one_step_off.samples_per_s / sync.samples_per_s, 2),
        "async x": round(result.samples_per_s / sync.samples_per_s, 2),
        "bound x": round(limit / sync.samples_per_s, 2),
        "trainer idle": f"{result.trainer_idle:.0%}",
        "rollout idle": f"{result.rollout_idle:.0%}",
        "mean staleness": round(result.staleness, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=COSTS, help="measured costs of a device")
    parser.add_argument(
        "--lengths", type=Path, nargs="+", default=LENGTHS, help="files of measured lengths, one row each"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 128, 512])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=8, help="prompts per device and step")
    parser.add_argument("--n", type=int, default=8, help="responses per prompt")
    parser.add_argument(
        "--tail", type=int, nargs="*", default=[], help="instead of --lengths: lognormal lengths, longest / mean"
    )
    parser.add_argument("--mean", type=int, default=512, help="for --tail")
    parser.add_argument("--sigma", type=float, default=1.0, help="for --tail")
    parser.add_argument("--slots", type=int, default=512, help="rollout.max_num_seqs")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--count", type=Path, help="print the lengths of these responses and exit")
    parser.add_argument("--tokenizer", help="for texts: the folder of a model")
    parser.add_argument("--fields", nargs="+", default=FIELDS, help="for texts: fields of the responses")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    if options.count:
        lengths = read_lengths(options.count, options.tokenizer, tuple(options.fields))
        print(json.dumps({"description": f"{options.count.name}, {options.tokenizer}", "answers": lengths}))
        return
    tables(works(options), Costs.read(options.costs), options)


def works(options: argparse.Namespace) -> list[Work]:
    """Workloads with measured or lognormal lengths, the longest tail last."""
    if options.tail:
        tails = [options.mean * tail for tail in options.tail]
        return [Work.lognormal(options.prompts, options.n, options.mean, tail, options.sigma) for tail in tails]
    workloads = []
    for path in options.lengths:
        lengths = read_lengths(path, options.tokenizer, tuple(options.fields))
        workloads.append(Work(options.prompts, in_groups(lengths, options.n), path.stem.removeprefix("answers_")))
    return sorted(workloads, key=lambda work: work.longest / work.mean)


def tables(workloads: list[Work], costs: Costs, options: argparse.Namespace) -> None:
    """Print tables over lengths at the middle number of devices; for the longest tail over devices and staleness."""
    middle, staleness, longest = options.ranks[len(options.ranks) // 2], options.staleness[-1], workloads[-1]
    report("by lengths", [row(work, costs, middle, staleness, options) for work in workloads], options.json)
    by_staleness = [row(longest, costs, middle, value, options) for value in options.staleness]
    report("by max_staleness, for the longest tail", by_staleness, options.json)
    by_ranks = [row(longest, costs, ranks, staleness, options) for ranks in options.ranks]
    report("by devices", by_ranks, options.json)


# Fields of the responses in files of `verl.trainer.main_generation` and `trainer.rollout_data_dir`.
FIELDS = ("responses", "output")


def read_lengths(path: Path, tokenizer: str | None, fields: tuple[str, ...] = FIELDS) -> list[list[int]]:
    """Tokens of every response, grouped by prompt.

    `path`: {"answers": [[tokens, …], …]}; JSON lines, each the tokens of one response or of all responses to a
    prompt; or texts, which need a `tokenizer`: Parquet or JSON lines with responses in `fields`, or a folder of JSON
    lines. Rows of a file with the same "input" belong to one prompt.
    """
    if path.suffix == ".json":
        return json.loads(path.read_text())["answers"]
    rows = [list(_rows(file)) for file in _files(path)]
    if rows and rows[0] and not isinstance(rows[0][0], dict):
        return [row if isinstance(row, list) else [row] for row in rows[0]]
    if tokenizer is None:
        raise SystemExit(f"{path} contains texts: set --tokenizer to the model that counts their tokens.")
    texts = [responses for file_rows in rows for responses in _by_prompt(file_rows, path, fields)]
    return _count_tokens(texts, tokenizer)


def in_groups(lengths: list[list[int]], size: int) -> list[list[int]]:
    """Groups of `size` lengths. Prompts with fewer responses are merged with the next ones: lengths vary more within
    such groups, and a long response delays them more often, than in real groups."""
    groups: list[list[int]] = [[]]
    for of_prompt in lengths:
        if len(groups[-1]) >= size:
            groups.append([])
        groups[-1] += of_prompt
    if len(groups) > 1 and len(groups[-1]) < size:
        groups.pop()
    return [group[:size] for group in groups]


def _files(path: Path) -> list[Path]:
    """Sorted by step number, if the files are named by step."""
    if not path.is_dir():
        return [path]
    return sorted(path.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem))


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(file).to_pylist()
    else:
        yield from (json.loads(line) for line in file.read_text().split("\n") if line.strip())


def _by_prompt(rows: list[dict[str, Any]], path: Path, fields: tuple[str, ...]) -> list[list[str]]:
    prompts: dict[Any, list[str]] = {}
    for number, row in enumerate(rows):
        values = [row[field] for field in fields if field in row]
        if not values:
            raise SystemExit(f"{path}: a row has no {' or '.join(fields)} (found: {', '.join(row)}). Set --fields.")
        texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
        prompts.setdefault(row.get("input", number), []).extend(texts)
    return list(prompts.values())


def _count_tokens(texts: list[list[str]], tokenizer: str) -> list[list[int]]:
    """Including the end token of each response."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    return [[len(ids) + 1 for ids in encode(group, add_special_tokens=False)["input_ids"]] for group in texts]


if __name__ == "__main__":
    main()
