"""Distill a larger model into a smaller one on a CPU in minutes: on-policy distillation, and SFT on teacher responses.

    python examples/distillation/distill.py [--mode reverse_kl_topk] [--folder runs/distillation]

All trainings are the commands of a real run (`verl.trainer.main_sft`, `verl.trainer.main_ppo`); only overrides differ.
Results that already exist in the folder are reused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from models import MAX_TOKENS, agreement, load, make_student, questions, write_responses

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from run import heading, train, warm_start_overrides
from task import make_task, word_tokenizer

PROJECT = "distillation"
TEACHER_STEPS, START_STEPS, STEPS, BATCH = 300, 400, 150, 64
QUESTIONS = 8192


def sft_overrides(data: Path, start: Path, folder: Path, name: str, steps: int, lr: float) -> list[str]:
    """Overrides of supervised training; of duplicates the last one wins."""
    return [
        *warm_start_overrides({"sft": data, "model": start}, folder),
        f"data.train_batch_size={BATCH}",
        f"optim.lr={lr}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / name}",
        f"trainer.project_name={PROJECT}",
        f"trainer.experiment_name={name}",
    ]


def distillation_overrides(
    files: Mapping[str, Path], start: Path, teacher: Path, folder: Path, name: str, mode: str, steps: int, lr: float
) -> list[str]:
    """Overrides of distillation only: no reward, no critic, one response per question."""
    return [
        f"data.train_files={files['train']}",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=16",
        f"data.max_response_length={MAX_TOKENS}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={start}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.actor.optim.lr={lr}",
        "actor_rollout_ref.actor.optim.lr_scheduler=cosine",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={BATCH}",
        "distillation.enabled=True",
        f"distillation.teacher_models.large.model_path={teacher}",
        f"distillation.distillation_loss.loss_mode={mode}",
        "distillation.distillation_loss.use_task_rewards=False",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / name}",
        f"trainer.project_name={PROJECT}",
        f"trainer.experiment_name={name}",
        "trainer.logger=[file]",
    ]


def run_once(module: str, overrides: Sequence[str], folder: Path, name: str, steps: int) -> Path:
    """Return the checkpoint of a training; run the training if it does not exist."""
    checkpoint = folder / name / f"global_step_{steps}"
    if not checkpoint.exists():
        train(module, list(overrides), folder, name)
    return checkpoint


def prepare(folder: Path) -> tuple[dict[str, Path], Path, Path, Path]:
    """Create task files, teacher, teacher responses, and a student with a short supervised training."""
    heading("1. A task, and a teacher of 436 thousand parameters trained on it")
    files = make_task(folder / "task")
    overrides = sft_overrides(files["sft"], files["model"], folder, "teacher", TEACHER_STEPS, 2e-3)
    teacher = run_once("verl.trainer.main_sft", overrides, folder, "teacher", TEACHER_STEPS)
    heading("2. Its responses to 8192 questions, and a student of 44 thousand parameters trained on some of them")
    tokenizer, teacher_data = word_tokenizer(), folder / "answers.parquet"
    if not teacher_data.exists():
        write_responses(load(model_in(teacher)), questions(files["train"], tokenizer), tokenizer, teacher_data)
    student = make_student(folder / "small")
    overrides = sft_overrides(teacher_data, student, folder, "start", START_STEPS, 2e-3)
    return files, teacher, teacher_data, run_once("verl.trainer.main_sft", overrides, folder, "start", START_STEPS)


def count_tokens(teacher_data: Path) -> int:
    """Tokens of all teacher responses, including end tokens."""
    return sum(len(text.split()) + 1 for text in pq.read_table(teacher_data).column("response").to_pylist())


def model_in(checkpoint: Path) -> Path:
    """The Hugging Face folder of a checkpoint."""
    return next(path.parent for path in checkpoint.rglob("huggingface/config.json"))


def measure(checkpoint: Path, teacher: Path, files: Mapping[str, Path]) -> Mapping[str, float]:
    prompts = questions(files["val"], word_tokenizer())
    return agreement(load(model_in(checkpoint)), load(model_in(teacher)), prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--mode", default="reverse_kl_topk", help="distillation.distillation_loss.loss_mode")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    folder, steps = options.folder.resolve(), options.steps
    files, teacher, teacher_data, start = prepare(folder)
    heading(f"3. {steps} steps of {BATCH} of teacher responses (SFT)")
    overrides = sft_overrides(teacher_data, start, folder, "sft", steps, options.lr)
    sft = run_once("verl.trainer.main_sft", overrides, folder, "sft", steps)
    heading(f"4. {steps} steps of {BATCH} of the student's own responses, scored by the teacher ({options.mode})")
    overrides = distillation_overrides(files, start, teacher, folder, options.mode, options.mode, steps, options.lr)
    distilled = run_once("verl.trainer.main_ppo", overrides, folder, options.mode, steps)
    heading("5. Agreement of student and teacher on 256 new questions")
    for name, checkpoint in (("before", start), ("SFT", sft), (options.mode, distilled)):
        metrics = measure(checkpoint, teacher, files)
        print(f"  {name:<18}" + "   ".join(f"{metric} {value:.3f}" for metric, value in metrics.items()))


if __name__ == "__main__":
    main()
