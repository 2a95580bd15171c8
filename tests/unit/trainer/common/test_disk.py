"""Disks: what cannot be written is said before models are loaded; one that fills up costs a save, not the run."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_harness import make_task, make_trainer, overrides, run_training
from verl.config import ConfigError, load_config
from verl.trainer.common.run_start import run_parts, step_bytes
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import check_run_start
from verl.trainer.recovery.step_end import UnsavedRunError
from verl.utils import disk
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager
from verl.utils.disk import UncachedFile

MB = 1_000_000


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 3 MB: one and a half steps of the tiny model."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", mount], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"file systems cannot be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def refuse(file: UncachedFile, data: Any) -> int:
    """As a file on a disk without a free block."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def command(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    return overrides(task, folder, "data.val_files=[]", "algorithm.adv_estimator=grpo", *more)


def problems(arguments: list[str]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_run_start(load_config(None, arguments), {})
    return {problem.key: problem.why for problem in caught.value.problems}


@pytest.mark.parametrize(
    "contents", ["[model,optimizer,extra,hf_model]", pytest.param("[model,extra]", marks=pytest.mark.slow)]
)
def test_the_planned_size_of_a_step_is_what_it_takes(task, tmp_path, contents):
    arguments = command(task, tmp_path, "trainer.total_training_steps=1")
    arguments.append(f"actor_rollout_ref.actor.checkpoint.save_contents={contents}")
    run_training(arguments)
    (part,) = run_parts(load_config(None, arguments))
    actor = tmp_path / "checkpoints" / "global_step_1" / "actor"
    heavy = sum(file.stat().st_size for file in actor.rglob("*") if file.suffix in (".distcp", ".safetensors"))
    assert step_bytes(part) == pytest.approx(heavy, rel=0.15), "what files add to small tensors aside"


def test_everything_that_cannot_be_written_is_said_at_once(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocked = tmp_path / "blocked"
    blocked.touch()
    (tmp_path / "runs").touch()
    found = problems(
        command(
            task,
            tmp_path,
            f"trainer.default_local_dir={blocked}/checkpoints",
            f"trainer.rollout_data_dir={blocked}/answers",
            "trainer.logger=[file]",
        )
    )
    assert set(found) == {"trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.logger"}
    assert all("cannot be written to" in why for why in found.values())


def test_checkpoints_that_will_not_fit_are_refused_with_the_sizes(task, small_disk):
    kept = ("trainer.save_freq=1", "trainer.total_training_steps=9")
    found = problems(command(task, small_disk, *kept, "trainer.max_actor_ckpt_to_keep=1"))
    assert f"its disk {small_disk} (tmpfs) has 3.1" in found["trainer.default_local_dir"]
    check_run_start(load_config(None, command(task, small_disk, *kept)), {}).close()


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_a_save_says_so_and_the_next_one_succeeds(task, small_disk, caplog):
    filler = small_disk / "filler"
    trainer = make_trainer(command(task, small_disk, "trainer.save_freq=1", "trainer.total_training_steps=2"))
    trainer.init_workers()
    filler.write_bytes(bytes(2 * MB))
    steps: list[int] = []
    save = trainer._save_checkpoint

    def saving() -> None:
        steps.append(trainer.global_steps)
        if len(steps) == 2:
            filler.unlink()
        save()

    trainer._save_checkpoint = saving
    with caplog.at_level(logging.WARNING, logger="verl"):
        trainer.fit()
    trainer.reward_fn.close()
    trainer.resource_pool_manager.release()
    root = small_disk / "checkpoints"
    assert [path.name for path in root.iterdir() if not path.name.startswith(".")].count("global_step_2") == 1
    assert CheckpointManager.verify(root / "global_step_2") == []
    assert not (root / "global_step_1").exists()
    assert trainer.history[-1]["training/failed_saves"] == 1.0
    said = [record.getMessage() for record in caplog.records if "space" in record.getMessage()]
    assert f"no space left on {small_disk} (tmpfs) for step 1" in said[-1]
    assert "MB or more" in said[-1]
    assert "are free" in said[-1]
    assert not list(root.glob(".global_step_*")), "no half is left"


def test_where_nothing_can_be_mounted_a_full_disk_is_one_that_refuses_to_write(task, tmp_path, monkeypatch):
    """The same at the boundary where files are written, on every machine."""
    monkeypatch.setattr(UncachedFile, "write", refuse)
    with pytest.raises(UnsavedRunError, match=r"\bstep 1\b.*DiskFullError: .*1\.\d+ MB .*max_actor_ckpt_to_keep"):
        run_training(command(task, tmp_path, "trainer.total_training_steps=1"))
    assert not list((tmp_path / "checkpoints").glob("*global_step*"))


def test_a_full_disk_is_recognised_by_number_by_cause_and_by_words():
    direct = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert disk.is_disk_full(direct)
    told = RuntimeError("rank 3: [Errno 28] No space left on device: '/x/extra.pt'")
    assert disk.is_disk_full(told)
    outer = ValueError("outer")
    outer.__cause__ = direct
    assert disk.is_disk_full(outer)
    assert not disk.is_disk_full(OSError(errno.EACCES, os.strerror(errno.EACCES)))
    assert (disk.format_bytes(999), disk.format_bytes(1_500_000)) == ("999 B", "1.5 MB")


def test_a_full_disk_costs_dumps_and_answers_not_the_run(task, small_disk, tmp_path, caplog):
    """It fills up after the checks at the start; said once for each key, counted, nothing half-written left."""
    answers, folder = small_disk / "answers", small_disk / "run"
    arguments = [
        *overrides(task, tmp_path, "algorithm.adv_estimator=grpo", "data.val_max_samples=2", "trainer.test_freq=1"),
        *(f"trainer.default_local_dir={folder}", "trainer.dump_steps=[1,2]", "trainer.total_training_steps=2"),
        *(f"trainer.rollout_data_dir={answers}/train", f"trainer.validation_data_dir={answers}/val"),
        "trainer.record.enable=False",  # its failures are counted in a later step
    ]

    class Fills(RayPPOTrainer):
        def _train_step(self, batch: Any) -> dict[str, float]:
            fill(small_disk / "fill")
            return super()._train_step(batch)

        def _save_checkpoint(self) -> None:
            """Another test's."""

    with caplog.at_level(logging.ERROR, logger="verl"):
        trainer = run_training(arguments, trainer_cls=Fills)
    _, last = trainer.history
    assert trainer.failures.metrics()["training/failed_dumps"] == 6, "two batches, two steps, two validations"
    assert last["training/failed_dumps"] >= 2, "files of responses are written in the background"
    assert any(name.startswith("val-core/") for name in last)
    assert "training/failed_validations" not in last
    keys = [record.getMessage().partition(" = ")[0] for record in caplog.records if record.levelno == logging.ERROR]
    assert set(keys) == {"trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"}
    assert len(keys) == 3
    assert "space" in caplog.text
    assert [path.name for path in small_disk.rglob("*") if path.suffix == ".pt" or ".jsonl" in path.name] == []


def fill(path: Path) -> None:
    """Until no byte is left."""
    with path.open("ab", buffering=0) as stream:
        for size in (65536, 4096, 1):
            try:
                while True:
                    stream.write(b"0" * size)
            except OSError:
                continue
