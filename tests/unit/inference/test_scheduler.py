"""What the scheduler plans: decode first, whole groups from one prefill, the youngest gives way, nothing impossible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.hash_runner import HashRunner, expected
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.inference.step_plan import StepPlan
from verl.types.request import Output, Request, SamplingParams

PARAMS = SamplingParams(max_new_tokens=8)


def make_engine(
    num_blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 32, steps_ahead: int = 0, **options
) -> Engine:
    caching = options.pop("prefix_caching", True)
    scheduler = Scheduler(BlockManager(num_blocks, block_size, caching), seqs, budget, 100, **options)
    return Engine(scheduler, HashRunner(num_blocks, block_size, seqs, budget, steps_ahead))


def sequences(*prompts: list[int], params: SamplingParams = PARAMS, group: str = "", first: int = 0) -> list[Sequence]:
    return [
        Sequence(Request(f"r{first + i}", prompt, replace(params, key=first + i), group), first + i)
        for i, prompt in enumerate(prompts)
    ]


def finish(engine: Engine) -> None:
    for _ in range(1000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("it does not end")


def postprocess(scheduler: Scheduler, plan: StepPlan, token: int = 3) -> list[Sequence]:
    n = len(plan.sample_slots)
    return scheduler.postprocess(plan, [token] * n, [-1.0] * n, [-1.0] * n, [-1.0] * n, 0)


def test_a_group_is_prefilled_once_and_its_members_sample_from_the_same_position():
    engine = make_engine()
    group = sequences(*[[1, 2, 3, 4, 5, 6]] * 5, group="g")
    engine.add(group)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [(p.start, p.token_ids, len(p.samples)) for p in plan.prefills] == [(0, [1, 2, 3, 4, 5, 6], 5)]
    assert plan.sample_slots == plan.prefills[0].samples == [s.slot for s in group]
    assert plan.sample_positions == [6] * 5
    assert len(plan.block_copies) == 4
    assert {source for source, _ in plan.block_copies} == {group[0].block_table[1]}
    assert {s.block_table[0] for s in group} == {group[0].block_table[0]}
    assert len({s.block_table[1] for s in group}) == 5


def test_members_of_a_group_that_come_between_others_share_the_step_they_are_admitted_in():
    engine = make_engine()
    a, b = sequences(*[[1] * 6] * 3, group="a"), sequences(*[[2] * 6] * 3, group="b", first=3)
    engine.add([sequence for pair in zip(a, b, strict=True) for sequence in pair])
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [p.samples for p in plan.prefills] == [[s.slot for s in a], [s.slot for s in b]]
    assert plan.sample_slots == [s.slot for s in a + b]


def test_a_cut_prompt_is_shared_when_its_last_piece_is_computed():
    engine = make_engine(budget=4)
    group = sequences(*[list(range(10))] * 3, group="g")
    engine.add(group)
    finish(engine)
    assert engine.runner.prefilled == 10
    assert [s.output for s in group] == [expected(s, s.output) for s in group]


def test_members_that_find_no_slot_use_what_the_cache_still_holds():
    engine = make_engine(seqs=2)
    group = sequences(*[list(range(10))] * 4, group="g")
    engine.add(group)
    finish(engine)
    # Two full blocks of four are found again; the rest of the prompt is computed once more, for both.
    assert engine.runner.prefilled == 10 + 2
    assert [s.output for s in group] == [expected(s, s.output) for s in group]


def test_equal_prefixes_are_computed_once_even_by_requests_of_one_step():
    engine = make_engine(budget=64)
    system = list(range(12))
    chats = sequences(*[[*system, 20 + i] for i in range(4)])
    engine.add(chats)
    engine.step()
    assert engine.runner.prefilled == 13 + 3 * 1
    finish(engine)
    assert [s.output for s in chats] == [expected(s, s.output) for s in chats]


def test_a_next_turn_finds_the_answer_of_the_turn_before():
    engine = make_engine()
    turn = sequences(list(range(9)))[0]
    engine.add([turn])
    finish(engine)
    before = engine.runner.prefilled
    engine.add(sequences([*turn.token_ids, 50, 51]))
    engine.step()
    # Of 9 + 8 tokens the last one was never fed: 16 are in four full blocks.
    assert engine.runner.prefilled - before == 19 - 16


def test_running_sequences_are_decoded_first_and_prompts_fill_the_step():
    engine = make_engine(budget=6)
    engine.add(sequences([1] * 3, [2] * 3))
    engine.step()
    engine.add(sequences([3] * 9, [4] * 2, first=2))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert (len(plan.decode_slots), plan.decode_positions) == (2, [3, 3])
    assert [(p.start, p.token_ids, p.samples) for p in plan.prefills] == [(0, [3] * 4, [])]
    postprocess(engine.scheduler, plan)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert [(p.start, len(p.token_ids)) for p in plan.prefills] == [(4, 4)], "nobody overtakes the one that was cut"


def test_without_chunked_prefill_a_step_decodes_or_computes_whole_prompts():
    engine = make_engine(budget=10, chunked_prefill=False)
    engine.add(sequences([1] * 6, [2] * 6, [3] * 23))
    shapes = []
    while (plan := engine.scheduler.schedule()) is not None and len(shapes) < 6:
        shapes.append(([len(p.token_ids) for p in plan.prefills], len(plan.decode_slots)))
        postprocess(engine.scheduler, plan)
    assert shapes == [([6], 0), ([6], 0), ([10], 0), ([10], 0), ([3], 0), ([], 3)]


def test_when_blocks_run_out_the_youngest_goes_back_to_the_head_of_the_queue():
    engine = make_engine(num_blocks=6, block_size=4, prefix_caching=False)
    first, second, third = everyone = sequences([1] * 7, [2] * 7, [3] * 4, params=replace(PARAMS, max_new_tokens=12))
    engine.add(everyone)
    preempted = []
    for _ in range(200):
        was_running = {s for s in everyone if s.slot >= 0}
        engine.step()
        preempted += [s for s in everyone if s in was_running and s.slot < 0 and not s.done]
        if not engine.has_work:
            break
    assert preempted
    assert first not in preempted
    assert [s.output.preemptions for s in everyone] == [preempted.count(s) for s in everyone]
    assert engine.scheduler.num_preempted == len(preempted)
    assert [s.output for s in everyone] == [expected(s, s.output) for s in everyone]
    assert [len(s.output.token_ids) for s in (first, second, third)] == [12] * 3


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_nothing_is_computed_past_the_longest_answer(steps_ahead):
    engine = make_engine(steps_ahead=steps_ahead)
    engine.add(sequences([1, 2, 3]))
    finish(engine)
    assert engine.runner.steps == 8


def test_a_step_ahead_wastes_one_row_on_a_sequence_that_had_ended_and_its_slot_is_taken_over():
    engine = make_engine(seqs=1, steps_ahead=1)
    free_running = sequences([1, 2, 3], params=replace(PARAMS, max_new_tokens=30))[0]
    engine.add([free_running])
    finish(engine)
    end = next(t for t in free_running.output.token_ids[3:] if t not in free_running.output.token_ids[:3])
    ended, follower = sequences([1, 2, 3], [7, 8], params=replace(PARAMS, max_new_tokens=30))
    ended = Sequence(replace(ended.request, params=replace(ended.params, eos_token_ids=frozenset([end]))))
    engine.add([ended, follower])
    finish(engine)
    assert ended.output.finish_reason == "stop"
    assert ended.output.token_ids == free_running.output.token_ids[: len(ended.output.token_ids)]
    assert follower.output == expected(follower, follower.output)
    assert len(follower.output.token_ids) == 30


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = make_engine(num_blocks=5, block_size=4)
    engine.check(Request("fits", [1] * 13, replace(PARAMS, max_new_tokens=8)))
    with pytest.raises(ValueError, match=r"'long': 14\b.*\b8\b.*\b6 KV blocks of 4\b.*\b5\b.*max_new_tokens"):
        engine.add(sequences([1]) and [Sequence(Request("long", [1] * 14, PARAMS))])
    with pytest.raises(ValueError, match=r"'longer': 100\b.*\b0\b.*max_model_len=100"):
        engine.check(Request("longer", [1] * 100, PARAMS))


def test_stop_strings_are_refused_where_nobody_can_read_them():
    with pytest.raises(ValueError, match=r"'r0': .*stop_token_ids"):
        make_engine().add(sequences([1], params=replace(PARAMS, stop=("x",))))


def test_more_running_sequences_than_a_step_has_tokens_are_not_admitted():
    engine = make_engine(budget=3, seqs=8)
    engine.add(sequences(*[[i] for i in range(8)]))
    for _ in range(4):
        plan = engine.scheduler.schedule()
        assert plan is not None
        assert len(plan.decode_slots) + sum(len(p.token_ids) for p in plan.prefills) <= 3
        postprocess(engine.scheduler, plan)


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ((math.nan, 0.0, 0.0), FloatingPointError, "version 7 .*log-prob nan .*token 3 .*'r1'"),
        ((-1.0, -math.inf, 0.0), FloatingPointError, "version 7 .*log-prob -1.0 .*token 3 .*'r1'"),
        ((-1.0, -1.0, math.nan), ValueError, "'r1': .*position 2:"),
    ],
)
def test_a_row_that_is_not_finite_ends_alone_with_an_error(columns, error, words):
    engine = make_engine()
    first, second = sequences([1, 2], [3, 4])
    engine.add([first, second])
    plan = engine.scheduler.schedule()
    assert plan is not None
    full, raw, sampled = ([value, bad] for value, bad in zip((-1.0, -2.0, -3.0), columns, strict=True))
    assert engine.scheduler.postprocess(plan, [3, 3], full, raw, sampled, 7) == [second]
    with pytest.raises(error, match=words):
        raise second.error
    assert second.done
    assert second.output == Output()
    assert first.output == Output([3], [-1.0], [7], "abort", [-2.0], [-3.0])
    following = engine.scheduler.schedule()
    assert following is not None
    assert following.decode_slots == [first.slot]


def test_a_row_that_was_removed_may_have_results_that_are_not_finite():
    engine = make_engine()
    other, gone = sequences([1, 2], [3, 4])
    engine.add([other, gone])
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.remove([gone])
    assert not engine.scheduler.postprocess(plan, [3, 3], [-1.0, math.nan], [0.0] * 2, [0.0] * 2, 7)
    assert other.output == Output([3], [-1.0], [7], "abort", [0.0], [0.0])
    assert gone.output == Output()
    assert gone.error is None


def test_the_output_of_another_engine_is_resumed_with_its_unknown_log_probs_marked():
    earlier = Output([3, 4], [-0.1, -0.2], [5, 5])
    sequence = Sequence(Request("r", [1, 2], PARAMS, resume_from=earlier))
    engine = make_engine()
    engine.add([sequence])
    finish(engine)
    output = sequence.output
    assert output.token_ids[:2] == [3, 4]
    assert output.versions == [5, 5] + [0] * 6
    assert [math.isnan(x) for x in output.raw_log_probs] == [True, True] + [False] * 6
    assert len(output.token_ids) == len(output.raw_log_probs) == len(output.sampled_log_probs) == 8
    assert earlier == Output([3, 4], [-0.1, -0.2], [5, 5]), "what was given is not written to"
