"""The simulator of pools: its clock by hand, and the laws that no schedule breaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from _pool_clock import Costs, Pool, Replica
from async_pools import COSTS as MEASURED
from async_pools import LENGTHS, Asynchronous, Work, bound, in_groups, read_lengths, synchronous

from tests.support.tiny import tiny_tokenizer

MATH = next(path for path in LENGTHS if "math500" in path.name)
# A step of one sequence takes a second, and half a second more for every other one.
COSTS = Costs(
    ((1, 1000.0), (3, 2000.0)), update_tokens_per_s=1e3, log_prob_tokens_per_s=1e4, weight_sync_s=1.0, step_overhead_s=0
)


def test_answers_slow_each_other_down_and_wait_for_a_slot():
    replica = Replica(COSTS, slots=2)
    for name, tokens in {"short": 2, "long": 4, "late": 3}.items():
        replica.add(tokens, name, now=0.0)
    assert replica.finish() == (3.0, "short"), "two steps of two sequences"
    replica.pause(3.0, 1.0)
    assert replica.finish() == (4.0 + 2 * 1.5, "long"), "late has its slot"
    assert replica.finish() == (7.0 + 1.0, "late"), "alone"
    assert replica.next_end() == float("inf")


def test_answers_go_to_the_replica_with_the_fewest():
    pool = Pool(COSTS, replicas=2, slots=4)
    pool.add([(5, "a"), (1, "b"), (1, "c")], now=0.0)
    assert pool.load == 3
    assert [pool.finish() for _ in range(3)] == [(1.0, "b"), (1.5, "c"), (1.5 + 4.0, "a")]


@pytest.mark.parametrize("tail", [2, 16])
def test_no_schedule_beats_the_work_and_no_answer_is_too_old(tail):
    costs, work = Costs.read(MEASURED), Work.lognormal(prompts=4, n=4, mean=200, longest=200 * tail, sigma=1.0)
    assert work.mean == pytest.approx(200, rel=0.01)
    sync = synchronous(work, costs, ranks=4, steps=4, slots=512).samples_per_s
    gains = []
    for staleness in (0, 1, 4):
        found = Asynchronous(work, costs, 2, 2, staleness, slots=512).run(steps=8, warm_up=staleness + 3)
        assert found.staleness <= staleness
        assert found.samples_per_s < bound(work, costs, 4)
        gains.append(found.samples_per_s / sync)
    assert gains[0] < gains[1] < gains[2]
    one = Asynchronous(work, costs, 2, 2, 1, slots=512, mode="one_step_off").run(steps=8, warm_up=4).samples_per_s
    assert one <= gains[1] * sync * 1.01, "it waits for weight syncs"


def test_lengths_that_were_measured_gain_what_the_docs_say():
    """MATH-500's, 8 devices: 1,550 tokens are the longest and 233 the mean."""
    found = {path.stem: read_lengths(path, None) for path in LENGTHS}
    assert {"answers_gsm8k", "answers_math500", "answers_ultrafeedback"} <= set(found)
    work, costs = Work(8, in_groups(found["answers_math500"], 8), "math500"), Costs.read(MEASURED)
    assert {len(group) for group in work.lengths} == {8}
    sync = synchronous(work, costs, ranks=8, steps=8, slots=512).samples_per_s
    found_8 = Asynchronous(work, costs, 1, 7, staleness=8, slots=512).run(steps=8, warm_up=11)
    assert 2.5 * sync < found_8.samples_per_s < bound(work, costs, 8)


@pytest.mark.parametrize(
    ("rollout", "staleness", "named", "then"),
    [
        (1, 4, "actor_rollout_ref.rollout.n_gpus_per_node", (3, 4)),
        (4, 1, "trainer.max_staleness=2", (4, 2)),
        (8, 4, "trainer.n_gpus_per_node up", (4, 4)),
    ],
    ids=["too few answer", "long answers hold up both", "too few train"],
)
def test_what_the_verdict_advises_helps(rollout: int, staleness: int, named: str, then: tuple[int, int]):
    """16 devices, MATH-500's lengths."""
    work, costs = Work(8, in_groups(read_lengths(MATH, None), 8), "math500"), Costs.read(MEASURED)
    before, after = (
        Asynchronous(work, costs, answering, 16 - answering, age, slots=512).run(steps=8, warm_up=age + 3)
        for answering, age in ((rollout, staleness), then)
    )
    assert named in before.advice
    assert after.samples_per_s > 1.2 * before.samples_per_s


def test_lengths_are_read_from_numbers_and_counted_in_what_runs_write(tmp_path: Path):
    (tmp_path / "numbers.jsonl").write_text("[3, 4]\n5\n")
    assert read_lengths(tmp_path / "numbers.jsonl", None) == [[3, 4], [5]]
    dump, model = tmp_path / "answers", str(tmp_path / "model")
    dump.mkdir()
    tiny_tokenizer().save_pretrained(model)
    for step, said in {2: "abc", 10: "abcd"}.items():
        rows = [{"input": "q", "output": said}, {"input": "r", "output": "\x85"}, {"input": "q", "output": ""}]
        (dump / f"{step}.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    counted = read_lengths(dump, model)
    assert counted == [[4, 1], [3], [5, 1], [3]], "by step and prompt, each with its end; bytes are tokens here"
    with pytest.raises(SystemExit, match="--tokenizer"):
        read_lengths(dump, None)
    with pytest.raises(SystemExit, match=r"\(found: input, output\).*--fields"):
        read_lengths(dump, model, fields=("text",))


def test_prompts_with_too_few_answers_are_joined():
    assert in_groups([[1], [2], [3], [4], [5]], 2) == [[1, 2], [3, 4]]
    assert in_groups([[1, 2, 3], [4, 5, 6]], 2) == [[1, 2], [4, 5]]
    assert in_groups([[1]], 2) == [[1]]
