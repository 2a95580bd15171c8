"""A larger model teaches a smaller one, on a CPU in minutes: on-policy distillation, and SFT on the teacher's answers.

    python examples/distillation/distill.py [--mode reverse_kl_topk] [--folder runs/distillation]

All trainings are the commands of a real run (`verl.trainer.main_sft`, `verl.trainer.main_ppo`); only overrides differ.
What is made already in the folder is not made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from models import LONGEST, agreement, load, make_student, questions, write_answers

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from run import heading, train, warm_start_overrides
from task import make_task, word_tokenizer

PROJECT = "distillation"
TEACHER_STEPS, START_STEPS, STEPS, BATCH = 300, 400, 150, 64
QUESTIONS = 8192


def sft_overrides(data: Path, start: Path, folder: Path, name: str, steps: int, lr: float) -> list[str]:
    """Supervised steps; those given last win."""
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
    """The teacher alone: no reward, no critic, one answer per question."""
    return [
        f"data.train_files={files['train']}",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=16",
        f"data.max_response_length={LONGEST}",
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


def made(module: str, overrides: Sequence[str], folder: Path, name: str, steps: int) -> Path:
    """The checkpoint of a training, which is run unless it is there."""
    checkpoint = folder / name / f"global_step_{steps}"
    if not checkpoint.exists():
        train(module, list(overrides), folder, name)
    return checkpoint


def prepare(folder: Path) -> tuple[dict[str, Path], Path, Path, Path]:
    """The task's files, the teacher, its answers, and the student that knows a little of the task."""
    heading("1. A task, and a teacher of 436 thousand parameters trained on it")
    files = make_task(folder / "task")
    overrides = sft_overrides(files["sft"], files["model"], folder, "teacher", TEACHER_STEPS, 2e-3)
    teacher = made("verl.trainer.main_sft", overrides, folder, "teacher", TEACHER_STEPS)
    heading("2. Its answers to 8192 questions, and a student of 44 thousand parameters that has read some of them")
    tokenizer, said = word_tokenizer(), folder / "answers.parquet"
    if not said.exists():
        write_answers(load(model_in(teacher)), questions(files["train"], tokenizer), tokenizer, said)
    student = make_student(folder / "small")
    overrides = sft_overrides(said, student, folder, "start", START_STEPS, 2e-3)
    return files, teacher, said, made("verl.trainer.main_sft", overrides, folder, "start", START_STEPS)


def answer_tokens(said: Path) -> int:
    """Of all of the teacher's answers, their ends included."""
    return sum(len(text.split()) + 1 for text in pq.read_table(said).column("response").to_pylist())


def model_in(checkpoint: Path) -> Path:
    """The folder that transformers loads."""
    return next(path.parent for path in checkpoint.rglob("huggingface/config.json"))


def measured(checkpoint: Path, teacher: Path, files: Mapping[str, Path]) -> Mapping[str, float]:
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
    files, teacher, said, start = prepare(folder)
    heading(f"3. {steps} steps of {BATCH} of the teacher's answers (SFT)")
    overrides = sft_overrides(said, start, folder, "sft", steps, options.lr)
    sft = made("verl.trainer.main_sft", overrides, folder, "sft", steps)
    heading(f"4. {steps} steps of {BATCH} of its own answers, which the teacher reads ({options.mode})")
    overrides = distillation_overrides(files, start, teacher, folder, options.mode, options.mode, steps, options.lr)
    distilled = made("verl.trainer.main_ppo", overrides, folder, options.mode, steps)
    heading("5. How far the student agrees with its teacher on 256 new questions")
    for name, checkpoint in (("before", start), ("SFT", sft), (options.mode, distilled)):
        found = measured(checkpoint, teacher, files)
        print(f"  {name:<18}" + "   ".join(f"{what} {value:.3f}" for what, value in found.items()))


if __name__ == "__main__":
    main()
