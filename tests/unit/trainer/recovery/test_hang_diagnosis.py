"""From what is known of every rank to the one sentence that says who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl.single_controller.base.heartbeat import Heartbeat, RankReport, find_collective
from verl.trainer.recovery.hang_diagnosis import diagnose_controller, diagnose_hang, report_table, slowest_rank
from verl.utils.stacks import Frame

HOST = (Frame("/x/verl/single_controller/base/worker.py", 60, "call", "verl"),)
UPDATE = (Frame("/x/verl/workers/engine/common/passes.py", 90, "forward_backward", "verl"), *HOST)
TORCH = "/v/site-packages/torch/distributed"
GATHER = (Frame(f"{TORCH}/distributed_c10d.py", 12, "all_gather_into_tensor"), Frame(f"{TORCH}/log.py", 3, "wrapper"))
REDUCE = (Frame(f"{TORCH}/distributed_c10d.py", 40, "all_reduce"),)
LOCK = (Frame("/usr/lib/python3.12/threading.py", 359, "wait"),)
MINE = (Frame("/home/me/reward.py", 7, "compute_score", "user"),)
GATHERS, REDUCES = GATHER + UPDATE, REDUCE + UPDATE


def rank(number: int, *stacks, state: str = "runs", method: str | None = "update_actor", done: int = 3) -> RankReport:
    return RankReport(
        "actor", number, f"node-{number // 2}", 4710 + number, state, Heartbeat(method, 62, done, 1, stacks)
    )


def idle(number: int) -> RankReport:
    return RankReport("actor", number, "node-0", 4710 + number, "runs")


CASES = {
    "a stopped rank": (
        [rank(0, GATHERS), rank(1, UPDATE, state="stopped"), rank(2, GATHERS), rank(3, GATHERS)],
        "stopped",
        [1],
        "rank 1 of actor (host node-0, pid 4711) is stopped (SIGSTOP); ranks 0, 2, 3 of actor wait for it in"
        " all_gather",
    ),
    "one that stopped while it waited itself": (
        [rank(0, GATHERS), rank(1, GATHERS, state="stopped")],
        "stopped",
        [1],
        "rank 1 of actor (host node-0, pid 4711) is stopped (SIGSTOP); rank 0 of actor waits for it in all_gather",
    ),
    "a rank whose engine's process stopped": (
        [
            replace(rank(0, LOCK), heartbeat=Heartbeat("generate_sequences", 62, 3, 1, (LOCK,), (4799, "stopped"))),
            idle(1),
        ],
        "stopped",
        [0],
        "rank 0 of actor (host node-0, pid 4710) waits for its engine's process (pid 4799), which is stopped (SIGSTOP);"
        " rank 1 of actor has finished",
    ),
    "agents whose engine does not answer": (
        [
            replace(
                rank(0, LOCK),
                role="agents",
                heartbeat=replace(rank(0, LOCK).heartbeat, silent_peer="rank 1 of rollout, whose engine"),
            )
        ],
        "alone",
        [0],
        "rank 0 of agents (host node-0, pid 4710) waits for rank 1 of rollout, whose engine",
    ),
    "one in a debugger": (
        [rank(0, GATHERS), rank(1, UPDATE, state="traced")],
        "traced",
        [1],
        "rank 1 of actor (host node-0, pid 4711) is stopped by a debugger; rank 0 of actor waits for it in all_gather",
    ),
    "a dead peer": (
        [idle(0), rank(1, state="dead")],
        "dead",
        [1],
        "rank 1 of actor (host node-0, pid 4711) has died; rank 0 of actor has finished",
    ),
    "a lost node": (
        [rank(0, REDUCES), rank(1, REDUCES), rank(2, state="unreachable"), rank(3, state="unreachable")],
        "unreachable",
        [2, 3],
        "rank 2 of actor (host node-1, pid 4712) does not answer, nor does its node; rank 3 of actor (host node-1, pid"
        " 4713) does not answer, nor does its node; ranks 0, 1 of actor wait in all_reduce",
    ),
    "one that holds the GIL": (
        [rank(0, GATHERS), rank(1, MINE + HOST, state="silent")],
        "silent",
        [1],
        "rank 1 of actor (host node-0, pid 4711) runs but does not answer (it holds the GIL, or its machine is"
        " overloaded), in compute_score (/home/me/reward.py:7); rank 0 of actor waits for it in all_gather",
    ),
    "a deadlock in the user's function": (
        [rank(0, LOCK + MINE + HOST), rank(1, GATHERS)],
        "user",
        [0],
        "rank 0 of actor (host node-0, pid 4710) is in the user's function compute_score (/home/me/reward.py:7); rank 1"
        " of actor waits for it in all_gather",
    ),
    "one in another thread than the one that computes": (
        [rank(0, LOCK + UPDATE, LOCK + MINE)],
        "user",
        [0],
        "rank 0 of actor (host node-0, pid 4710) is in the user's function compute_score (/home/me/reward.py:7)",
    ),
    "the user's code that has called ours": (
        [rank(0, LOCK + UPDATE + MINE + HOST), rank(1, GATHERS)],
        "behind",
        [0],
        "rank 0 of actor (host node-0, pid 4710) is in update_actor, at forward_backward"
        " (/x/verl/workers/engine/common/passes.py:90); rank 1 of actor waits for it in all_gather",
    ),
    "ranks in different collectives": (
        [rank(0, GATHERS), rank(1, REDUCES), rank(2, GATHERS)],
        "mismatch",
        [],
        "ranks wait in different collectives: ranks 0, 2 of actor in all_gather"
        " (/x/verl/workers/engine/common/passes.py:90); rank 1 of actor in all_reduce"
        " (/x/verl/workers/engine/common/passes.py:90)",
    ),
    "the same one from different places": (
        [rank(0, GATHERS), rank(1, GATHER + MINE)],
        "mismatch",
        [],
        "ranks wait in different collectives: rank 0 of actor in all_gather"
        " (/x/verl/workers/engine/common/passes.py:90); rank 1 of actor in all_gather (/home/me/reward.py:7)",
    ),
    "a collective that one rank does not make": (
        [rank(0, GATHERS), idle(1)],
        "mismatch",
        [1],
        "rank 0 of actor waits in all_gather; rank 1 of actor has finished the call without entering this collective",
    ),
    "all ranks in one collective": (
        [rank(0, GATHERS), rank(1, GATHERS)],
        "together",
        [],
        "all ranks wait in all_gather (/x/verl/workers/engine/common/passes.py:90): the network between them may"
        " be interrupted, or they wait for a rank of another group",
    ),
    "ranks that have nothing to do": (
        [idle(0), idle(1)],
        "idle",
        [],
        "ranks 0, 1 of actor have nothing to do: a request or its answer was lost",
    ),
    "a rank that works alone": (
        [idle(0), rank(1, UPDATE)],
        "alone",
        [1],
        "rank 1 of actor (host node-0, pid 4711) is in update_actor, at forward_backward"
        " (/x/verl/workers/engine/common/passes.py:90); rank 0 of actor has finished",
    ),
    "a breakpoint": ([rank(0, (Frame("/usr/lib/python3.12/pdb.py", 1, "cmdloop"), *UPDATE))], "debugged", [], None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_names_the_kind_the_culprits_and_what_the_others_wait_in(name):
    reports, kind, culprits, sentence = CASES[name]
    diagnosis = diagnose_hang(reports)
    assert (diagnosis.kind, [report.rank for report in diagnosis.culprits]) == (kind, culprits)
    assert sentence is None or diagnosis.sentence == sentence


@pytest.mark.parametrize(
    ("stack", "kind", "sentence"),
    [
        (LOCK + MINE + UPDATE, "user", "the controller is in the user's function compute_score (/home/me/reward.py:7)"),
        (
            LOCK + UPDATE + MINE,
            "controller",
            "the controller is in forward_backward (/x/verl/workers/engine/common/passes.py:90)",
        ),
        ((), "controller", "the controller is in no Python code"),
    ],
)
def test_without_ranks_at_work_the_controllers_own_place_is_named(stack, kind, sentence):
    diagnosis = diagnose_controller(stack)
    assert (diagnosis.kind, diagnosis.sentence) == (kind, sentence)


def test_the_rank_that_others_wait_for_is_found_whether_they_wait_or_have_finished():
    assert slowest_rank([rank(0, GATHERS), rank(1, UPDATE)]).rank == 1
    assert slowest_rank([idle(0), idle(2), rank(1, UPDATE)]).rank == 1
    assert slowest_rank([rank(0, UPDATE), rank(1, UPDATE)]) is None
    assert slowest_rank([rank(0, GATHERS), rank(1, GATHERS)]) is None
    assert slowest_rank([rank(0, UPDATE)]) is None, "nobody waits for a single rank"


def test_the_table_has_a_line_and_the_stacks_of_every_rank():
    text = report_table([rank(0, GATHERS), rank(1, UPDATE, MINE, state="stopped"), idle(2)])
    lines = [line.split() for line in text.splitlines()]
    assert lines[:4] == [
        ["rank", "pid", "host", "state", "method", "seconds", "units", "collective"],
        ["actor[0]", "4710", "node-0", "runs", "update_actor", "62", "3", "all_gather"],
        ["actor[1]", "4711", "node-0", "stopped", "update_actor", "62", "3", "-"],
        ["actor[2]", "4712", "node-0", "runs", "-", "0", "0", "-"],
    ]
    assert "actor[1], stack, last known:\n    forward_backward (/x/verl/" in text
    assert "actor[1], another thread, last known:\n    compute_score (/home/me/reward.py:7)" in text


@pytest.mark.parametrize(
    ("file", "function", "name"),
    [
        (f"{TORCH}/distributed_c10d.py", "reduce_scatter_tensor", "reduce_scatter"),
        (f"{TORCH}/distributed_c10d.py", "_object_to_tensor", None),
        (f"{TORCH}/distributed_c10d.py", "init_process_group", "init_process_group"),
        (f"{TORCH}/fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard", "all_gather"),
        ("/x/verl/utils/transfer_group.py", "broadcast", "broadcast"),
        ("/home/me/my.py", "broadcast", None),
    ],
)
def test_a_collective_is_known_by_torchs_own_names(file, function, name):
    assert find_collective((Frame(file, 1, function), *UPDATE)) == name
