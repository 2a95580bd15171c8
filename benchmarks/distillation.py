"""On-policy distillation compared with SFT on teacher responses, with tiny models.

    python benchmarks/distillation.py [--folder runs/distillation] [--steps 150] [--lr 2e-3] [--modes k3 …]

The task, the models and the settings are those of `examples/distillation`. All students start from the same
checkpoint and train for the same number of steps and responses; `answer tokens` is the number of trained tokens.
All metrics are measured on 256 new questions, the KL over the whole vocabulary. The trainer runs in this process,
without Ray.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _report import report

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "distillation"))
import distill

MODES = ("k3", "k3+", "reverse_kl_topk", "forward_kl_topk", "k1 as reward")
AS_REWARD = " as reward"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--steps", type=int, default=distill.STEPS)
    parser.add_argument(
        "--lr", type=float, nargs="+", default=[5e-4, 2e-3], help="learning rates; the best is reported for each mode"
    )
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--json", type=Path, default=None, help="append the result to this file")
    options = parser.parse_args()
    folder = options.folder.resolve()
    files, teacher, teacher_data, start = distill.prepare(folder)
    rows: list[Mapping[str, Any]] = [{"student": "before", **distill.measure(start, teacher, files)}]
    candidates = []
    for lr in options.lr:
        name = f"sft-{lr:g}"
        begin = time.perf_counter()
        overrides = distill.sft_overrides(teacher_data, start, folder, name, options.steps, lr)
        sft = distill.run_once("verl.trainer.main_sft", overrides, folder, name, options.steps)
        tokens = distill.BATCH * options.steps * distill.count_tokens(teacher_data) / distill.QUESTIONS
        candidates.append(_row("SFT", lr, sft, teacher, files, tokens, time.perf_counter() - begin))
    rows.append(_best(candidates))
    for mode in options.modes:
        candidates = []
        for lr in options.lr:
            begin = time.perf_counter()
            checkpoint, tokens = _distill(files, start, teacher, folder, mode, lr, options.steps)
            candidates.append(_row(mode, lr, checkpoint, teacher, files, tokens, time.perf_counter() - begin))
        rows.append(_best(candidates))
    report("on-policy distillation and SFT on teacher responses", rows, options.json)


def _row(
    name: str, lr: float, checkpoint: Path, teacher: Path, files: Mapping[str, Path], tokens: float, seconds: float
) -> Mapping[str, Any]:
    measured = distill.measure(checkpoint, teacher, files)
    print(f"{name}, lr {lr:g}: " + ", ".join(f"{metric} {value:.3f}" for metric, value in measured.items()), flush=True)
    return {"student": name, **measured, "answer tokens": int(tokens), "lr": lr, "seconds": round(seconds)}


def _best(rows: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    return min(rows, key=lambda row: row["KL to the teacher"])


def _distill(
    files: Mapping[str, Path], start: Path, teacher: Path, folder: Path, mode: str, lr: float, steps: int
) -> tuple[Path, float]:
    """Run a distillation in this process; return its checkpoint and the number of trained tokens."""
    from verl.config import load_config
    from verl.single_controller.local import LocalWorkerGroup
    from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils import hf_tokenizer

    name = f"{mode.replace(' ', '-')}-{lr:g}"
    overrides = distill.distillation_overrides(
        files, start, teacher, folder, name, mode.removesuffix(AS_REWARD), steps, lr
    )
    if mode.endswith(AS_REWARD):
        # gamma 0: rewards per token. With summed rewards the shortest response would be closest to the teacher.
        overrides += ["distillation.distillation_loss.as_reward=True", "algorithm.adv_estimator=reinforce_plus_plus"]
        overrides += ["algorithm.gamma=0"]
    config = load_config(None, [*overrides, "trainer.used_dir=move_aside", "trainer.resume_mode=disable"])
    runner, tokens = TaskRunner(), 0.0
    runner.add_actor_rollout_worker(config)
    runner.add_teacher_worker(config)

    class TokenCountingTrainer(RayPPOTrainer):
        def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
            nonlocal tokens
            tokens += metrics["response_length/mean"] * distill.BATCH

    tokenizer = hf_tokenizer(str(distill.model_in(start)))
    data = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    pools = runner.init_resource_pool_mgr(config)
    trainer = TokenCountingTrainer(
        config,
        tokenizer,
        runner.role_worker_mapping,
        pools,
        ray_worker_group_cls=LocalWorkerGroup,
        train_dataset=data,
        train_sampler=create_rl_sampler(config.data, data),
        device_name="cpu",
    )
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        pools.release()
    return folder / name / f"global_step_{steps}", tokens


if __name__ == "__main__":
    main()
