"""Agents: many slow tools compared with their critical path, and a GRPO step with two turns compared with one turn.

    python benchmarks/agents.py                 # 512 trajectories whose tools take 1 ms to 2 s
    python benchmarks/agents.py --gpu           # the GRPO step, Qwen2.5-0.5B's shape; under 3 minutes on an H200
    python benchmarks/agents.py --parts         # run sandbox.py and search.py

All runs use `main_ppo` on Ray with the native engine and random weights. The critical path is the longest sum of
measured tool and generation seconds of a trajectory. No schedule can be faster than the longest sum of tool seconds
alone. Two turns sample as many tokens as the single turn and have the same total length: in the single turn the tool
output is part of the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _agent_loops import TOOL_TOKENS, latencies
from _ours_step import base, run
from _report import report
from _shapes import matmul_rate
from _training_work import Work

ROLLOUT = "actor_rollout_ref.rollout"
LOOPS = Path(__file__).parent / "_agent_loops.py"
# Goals: generation time relative to the critical path, and the additional time of two turns relative to one.
MAX_CRITICAL_PATH_RATIO, MAX_OVERHEAD = 1.2, 0.15


def agents(loop: str, work: Work, workers: int) -> list[str]:
    """Overrides that run this loop for every row, all at the same time."""
    return [
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.agent.default_agent_loop={LOOPS}:{loop}",
        f"{ROLLOUT}.agent.num_workers={workers}",
        f"{ROLLOUT}.agent.max_concurrent_requests={-(-work.samples // workers)}",
        f"{ROLLOUT}.max_num_seqs={work.samples}",
    ]


def slow_tools(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Generation of `--trajectories` trajectories, 8 per prompt: mean seconds relative to the critical path."""
    calls, tokens = options.calls, options.tokens
    response = (calls + 1) * tokens + calls * TOOL_TOKENS
    work = Work("slow-tools", options.shape or "tiny", options.trajectories // 8, 8, 32, response, response, 3)
    work.write(folder)
    os.environ |= {"AGENTS_CALLS": str(calls), "AGENTS_TOKENS": str(tokens)}
    dumps = folder / "dumps"
    settings = [*agents("SlowTools", work, options.workers), f"trainer.rollout_data_dir={dumps}"]
    settings += base(work, 16384, checkpointing=False, compiled=False)
    rows = run(work, folder, "agents", settings, options.limit, rate=1.0)
    if "s" not in rows[-1]:
        return rows
    gen = next(row["s"] for row in rows if row["phase"] == "gen")
    chains, tools = [], []
    for step in range(2, work.steps + 1):
        lines = [json.loads(line) for line in (dumps / f"{step}.jsonl").read_text().splitlines()]
        assert len(lines) == work.samples
        metrics = [line["agent_metrics"] for line in lines]
        chains.append(max(row["tool_s"] + row["generate_s"] for row in metrics))
        tools.append([sum(latencies(line["index"], line["sample_index"], calls)) for line in lines])
    chain, longest = sum(chains) / len(chains), sum(map(max, tools)) / len(tools)
    return [
        {
            "trajectories": work.samples,
            "calls per trajectory": calls,
            "generation s": gen,
            "critical path s": chain,
            "× critical path": gen / chain,
            "longest tools alone s": longest,
            "× tools alone": gen / longest,
            "sequential s": sum(map(sum, tools)) / len(tools),
            "goal": f"≤ {MAX_CRITICAL_PATH_RATIO} × critical path",
            "met": gen <= MAX_CRITICAL_PATH_RATIO * chain,
        }
    ]


def two_turns(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Complete steps by phase: single-turn responses (`rollout.mode=sync`) and two turns with the same tokens."""
    cuda = torch.cuda.is_available()
    shape = options.shape or ("qwen2.5-0.5b" if cuda else "tiny")
    prompts, n, prompt, tokens = (32, 8, 128, 256) if cuda else (4, 4, 32, 32)
    budget, rate = (8192, matmul_rate("cuda")) if cuda else (512, matmul_rate("cpu"))
    os.environ["AGENTS_TOKENS"] = str(tokens)
    single = Work("single-turn", shape, prompts, n, prompt + TOOL_TOKENS, tokens, tokens, options.steps)
    double = Work("two-turn", shape, prompts, n, prompt, tokens + TOOL_TOKENS, tokens + TOOL_TOKENS, options.steps)
    table, steps = [], {}
    for work, settings in ((single, []), (double, agents("TwoTurns", double, min(options.workers, 2)))):
        work.write(folder)
        rows = run(work, folder, "step", [*base(work, budget, False, cuda), *settings], options.limit, rate)
        table += [{"case": row["case"], "phase": row["phase"], **row} for row in rows]
        steps[work.case] = rows[-1].get("s")
    if all(steps.values()):
        more = steps["two-turn"] - steps["single-turn"]
        share = more / steps["single-turn"]
        table.append({"case": "two turns cost", "phase": "step", "s": more, "overhead %": 100 * share})
        table[-1] |= {"goal": f"< {100 * MAX_OVERHEAD:.0f} %", "met": share < MAX_OVERHEAD}
    return table


def parts() -> None:
    """Run the benchmarks of sandbox and search."""
    for name in ("sandbox.py", "search.py"):
        subprocess.run([sys.executable, str(Path(__file__).parent / name)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the GRPO step; without a GPU a tiny trial run")
    parser.add_argument("--parts", action="store_true", help="run sandbox.py and search.py")
    parser.add_argument("--shape", help="model shape; default: tiny, with --gpu qwen2.5-0.5b")
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--calls", type=int, default=6, help="tool calls of each trajectory")
    parser.add_argument("--tokens", type=int, default=4, help="tokens sampled per turn")
    parser.add_argument("--workers", type=int, default=4, help="rollout.agent.num_workers")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run with --gpu; the first is not counted")
    parser.add_argument("--limit", type=float, default=85.0, help="maximum seconds of a run, including its start")
    parser.add_argument("--folder", type=Path, help="keeps models and logs; default: a temporary one")
    parser.add_argument("--json", help="append every table to this file")
    options = parser.parse_args()
    if options.parts:
        parts()
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        if options.gpu:
            report("a GRPO step with one turn and with two", two_turns(options, folder), options.json)
        else:
            report("tools of 1 ms to 2 s", slow_tools(options, folder), options.json)


if __name__ == "__main__":
    main()
