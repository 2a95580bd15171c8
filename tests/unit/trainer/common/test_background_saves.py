"""Steps are written behind training: in order, whole at any moment, and true when they are read back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.training_harness import make_task, overrides, run_training
from verl.config import SFTConfig, load_config
from verl.single_controller.base import Worker
from verl.trainer.common.checkpoint import Saver, background_part
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.recovery.step_end import UnsavedRunError
from verl.trainer.supervised.sft import SFTTrainer
from verl.utils.checkpoint import remote
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, resolve_resume
from verl.utils.py_functional import MASK

REPOSITORY = Path(__file__).parents[4]

# One rank that writes like an engine: what it holds is frozen in `begin_save` and goes to files in `finish_save`.
KILLED_AT_EVERY_OPERATION = """
import json, os, shutil, signal, sys
from pathlib import Path
from types import SimpleNamespace
from verl.single_controller.base import ClassWithInitArgs, Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.common.checkpoint import Saver
from verl.utils.checkpoint.manifest import ChecksumRecorder

class Rank(Worker):
    content = b"old"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, path):
        self.frozen = Path(path), Rank.content

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, lane="control")
    def finish_save(self):
        with ChecksumRecorder(self.frozen[0]) as recorder:
            for shard in range(2):
                with recorder.open(f"shard_{shard}") as file:
                    file.write(self.frozen[1])

class Tokenizer:
    def save_pretrained(self, folder):
        Path(folder, "tokenizer.json").write_text("{}")

before, (steps, limits, copies, every) = Path(sys.argv[1]) / "before", map(json.loads, sys.argv[2:])
parts = {part: LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Rank)) for part in ("actor", "critic")}

def saver(root):
    trainer = SimpleNamespace(default_local_dir=str(root), default_hdfs_dir=copies and str(root / copies))
    return Saver(SimpleNamespace(trainer=trainer, to_dict=dict), limits, Tokenizer())

def save(saver, step):
    saver.begin({"global_steps": step}, parts, ["actor/huggingface"])

# The audit hook sees every open, mkdir, rename, unlink and rmdir before it happens: the child dies at the nth.
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
counted = 0

def die_at(number):
    def hook(event, arguments):
        global counted
        if event in OPERATIONS:
            counted += 1
            if counted == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

first = saver(before)
for step in steps:
    save(first, step)
first.close()
for number in range(1, 2000, every):
    root = Path(shutil.copytree(before, before.with_name(str(number))))
    child = os.fork()
    if child == 0:
        second = saver(root)
        Rank.content = b"new"
        die_at(number)
        save(second, 2)
        Rank.content = b"newer"  # the next step trains
        second.close()
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(number)
        break
"""


def newest(root: Path) -> str:
    """What the newest step holds; everything that can be wrong with the folder or its copies fails here."""
    path = resolve_resume("auto", root)
    assert CheckpointManager.verify(path) == []
    assert CheckpointManager.verify(root / (root / "latest").read_text()) == []
    problems = [problem for step in root.glob("global_step_*") for problem in CheckpointManager.verify(step)]
    assert all(problem.startswith("critic: deleted, ") for problem in problems), problems
    assert [name for name in root.glob(".*") if name.name != ".lock"] == []
    for copy in (root / "copies").glob("*/manifest.json"):
        assert CheckpointManager.verify(copy.parent) == [], "a copy with a manifest is whole"
    return (path / "actor" / "shard_0").read_text()


@pytest.mark.parametrize(
    ("before", "max_to_keep", "copies", "every"),
    [
        ([1, 2], 1, "copies", 24),
        pytest.param([1, 2], 1, "copies", 1, marks=pytest.mark.slow),
        pytest.param([1], {"actor": 2, "critic": 1}, None, 1, marks=pytest.mark.slow),
    ],
    ids=["every 24th", "replaced", "parts"],
)
def test_killed_before_a_file_operation_of_a_save_and_its_copy(tmp_path, before, max_to_keep, copies, every):
    """Killed before the first operation, then before the (1 + `every`)th and so on, in a new process each time."""
    given = [str(tmp_path), *map(json.dumps, (before, max_to_keep, copies, every))]
    command = [sys.executable, "-c", KILLED_AT_EVERY_OPERATION, *given]
    result = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    survived = int(result.stdout)
    states = [newest(tmp_path / str(number)) for number in range(1, survived + 1, every)]
    assert survived > 40
    assert set(states) == {"old", "new"}
    assert states == sorted(states, reverse=True), "once the new step is there it stays"


# ---------------------------------------------------------------- whole runs


def hold_saves(engine: Any, saver: Saver) -> None:
    """A save ends only when the next one, or the end of the run, waits for it."""
    may_end = threading.Semaphore(0)
    finish, wait_for_turn, collect = engine.finish_save, saver.wait_for_turn, saver.collect

    def finish_when_allowed() -> None:
        assert may_end.acquire(timeout=250)
        finish()

    def let_the_one_before_end(step: int) -> None:
        if saver.newest_step is not None:
            may_end.release()
        wait_for_turn(step)

    def let_the_last_end(wait: bool = False) -> Any:
        if wait:
            may_end.release()
        return collect(wait)

    engine.finish_save = finish_when_allowed
    saver.wait_for_turn, saver.collect = let_the_one_before_end, let_the_last_end


class Held(RayPPOTrainer):
    """Notes which steps are there whenever it has taken one."""

    def init_workers(self) -> None:
        super().init_workers()
        self.there: list[list[str]] = []
        hold_saves(self.actor_wg.worker.engine, self.state.saver)

    def _train_step(self, batch: Any) -> dict[str, float]:
        metrics = super()._train_step(batch)
        self.there.append(sorted(path.name for path in Path(self.config.trainer.default_local_dir).glob("g*")))
        return metrics


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


def command(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    few = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.val_files=[]")
    offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
    return overrides(task, folder, *few, offload, "trainer.save_freq=1", "trainer.total_training_steps=3", *more)


def test_a_save_in_flight_while_others_train_is_the_state_of_its_step(task, tmp_path):
    """And the one that is due meanwhile waits for it, so they end in order."""
    whole = run_training(command(task, tmp_path / "a"), trainer_cls=Held)
    assert whole.there == [[], [], ["global_step_1"]], "a step is taken while the one before is being written"
    first, second, third = whole.history
    assert "checkpoint/background_s" not in first
    assert second["checkpoint/background_s"] > second["checkpoint/wait_s"] > 0
    assert second["timing_s/save_checkpoint"] >= second["checkpoint/wait_s"]
    assert third["checkpoint/gb"] > 0.001
    path = tmp_path / "a" / "checkpoints" / "global_step_1"
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    resumed = run_training(command(task, tmp_path / "b", *resume))
    assert [row["step"] for row in resumed.history] == [2, 3]
    assert all(torch.equal(resumed.final_weights[name], value) for name, value in whole.final_weights.items())


@pytest.mark.slow
def test_supervised_steps_train_while_the_one_before_is_written_and_resume_bit_for_bit(task, tmp_path):
    rows = [{"prompt": f"add {i} and {i}", "response": f"{i + i}"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def fit(folder: str, *more: str) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
        given = (f"model.path={task['model']}", f"data.train_files={tmp_path}/train.jsonl", "data.train_batch_size=2")
        keys = ("data.max_length=64", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[]")
        local = f"trainer.default_local_dir={tmp_path / folder}"
        steps = ("trainer.total_training_steps=3", "trainer.save_freq=1")
        there: list[list[str]] = []
        with SFTTrainer(load_config(None, [*given, *keys, *steps, local, *more], root=SFTConfig)) as trainer:
            trainer.start()
            engine = trainer.worker_group.worker.engine
            hold_saves(engine, trainer.saver)
            train = trainer._train_step

            def noting(batch: Any) -> dict[str, float]:
                metrics = train(batch)
                there.append(sorted(path.name for path in (tmp_path / folder).glob("g*")))
                return metrics

            trainer._train_step = noting
            trainer.fit()
            return there, {
                name: value.clone() for bucket in engine.buckets(None, 1 << 30) for name, value in bucket.items()
            }

    there, whole = fit("a")
    assert there == [[], [], ["global_step_1"]]
    first = tmp_path / "a" / "global_step_1"
    _, resumed = fit("b", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={first}")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


class BreaksBehind(RayPPOTrainer):
    """The first save fails when it is written."""

    def init_workers(self) -> None:
        super().init_workers()
        engine = self.actor_wg.worker.engine
        finish, failures = engine.finish_save, [OSError("the shard is gone"), *self.also]

        def finish_or_fail() -> None:
            finish()
            if failures:
                raise failures.pop(0)

        engine.finish_save = finish_or_fail

    also: tuple[Exception, ...] = ()


def test_a_save_that_fails_behind_training_is_counted_and_leaves_nothing(task, tmp_path, caplog):
    trainer = run_training(command(task, tmp_path, "trainer.total_training_steps=2"), trainer_cls=BreaksBehind)
    assert "training/failed_saves" not in trainer.history[0]
    assert trainer.history[1]["training/failed_saves"] == 1.0
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*step*"))
    assert names == ["global_step_2"]
    assert "save of step 1 failed: WorkerCallError: worker raised OSError: the shard is gone" in caplog.text


class LosesItsFolder(RayPPOTrainer):
    """Somebody deletes it, or its disk goes, while the last step is written."""

    def init_workers(self) -> None:
        super().init_workers()
        engine = self.actor_wg.worker.engine
        finish = engine.finish_save

        def finish_and_lose() -> None:
            finish()
            shutil.rmtree(self.config.trainer.default_local_dir)

        engine.finish_save = finish_and_lose


@pytest.mark.slow
def test_a_folder_that_goes_while_the_last_step_is_written_is_an_unsaved_end(task, tmp_path):
    with pytest.raises(UnsavedRunError, match=r"\bstep 1\b.*FileNotFoundError"):
        run_training(command(task, tmp_path, "trainer.total_training_steps=1"), trainer_cls=LosesItsFolder)


class LosesWeights(BreaksBehind):
    also = (FloatingPointError("weights are not finite"),)


@pytest.mark.slow
def test_weights_that_a_background_save_finds_lost_end_the_run_with_their_step(task, tmp_path):
    with pytest.raises(RuntimeError, match=r"^step 2: .*optim\.lr"):
        run_training(command(task, tmp_path), trainer_cls=LosesWeights)


def test_a_last_step_that_does_not_read_back_is_an_unsaved_end(task, tmp_path, monkeypatch):
    commit = CheckpointManager.commit

    def commit_and_damage(manager: CheckpointManager, step: int) -> Path:
        path = commit(manager, step)
        file = path / "trainer.pt"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        return path

    monkeypatch.setattr(CheckpointManager, "commit", commit_and_damage)
    with pytest.raises(UnsavedRunError, match=r"trainer\.pt: damaged"):
        run_training(command(task, tmp_path, "trainer.total_training_steps=1"))


@pytest.mark.slow
def test_a_store_that_is_away_costs_copies_not_the_run(task, tmp_path, monkeypatch, caplog):
    def fails(folder: Path, store: str) -> None:
        raise ConnectionError("the store is away")

    monkeypatch.setattr(remote, "upload_step", fails)
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    keys = ("trainer.total_training_steps=1", f"trainer.default_hdfs_dir={tmp_path}/store")
    trainer = run_training(command(task, tmp_path, *keys))
    assert CheckpointManager.verify(tmp_path / "checkpoints" / "global_step_1") == []
    assert f"{tmp_path}/store has no complete copy of global_step_1." in caplog.text
    assert trainer.state.saver.metrics()["training/failed_copies"] == 2, "after the save, and at the end"


class Both(Worker):
    def save_checkpoint(self, path: str) -> None: ...

    def begin_save(self, path: str) -> None: ...


class SavesItsOwnWay(Both):
    def save_checkpoint(self, path: str) -> None: ...


class BeginsItsOwnWay(SavesItsOwnWay):
    def begin_save(self, path: str) -> None: ...


@pytest.mark.parametrize(("cls", "behind"), [(Both, True), (SavesItsOwnWay, False), (BeginsItsOwnWay, True)])
def test_a_worker_with_a_save_of_its_own_is_saved_by_that(cls, behind):
    assert hasattr(background_part(cls(), cls), "begin_save") is behind


def test_the_configuration_in_a_checkpoint_has_no_secrets(tmp_path):
    config = {"reward": {"api_key": "sk-1", "url": "https://user:pw@host/v1?token=t"}, "hub": {"HF_TOKEN": "hf-1"}}
    trainer = SimpleNamespace(default_local_dir=str(tmp_path), default_hdfs_dir=None)
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    saver = Saver(SimpleNamespace(trainer=trainer, to_dict=lambda: config), None, tokenizer)
    saver.begin({"global_steps": 1}, {})
    (save,) = saver.collect(wait=True)
    assert save.error is None
    assert json.loads((save.path / "config.json").read_text()) == {
        "reward": {"api_key": MASK, "url": f"https://{MASK}@host/v1?token={MASK}"},
        "hub": {"HF_TOKEN": MASK},
    }
