"""Tracking through the real console, file and tensorboard backends; absent ones are refused before training."""

import dataclasses
import importlib
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.config import load_config
from verl.utils.console import log_startup_phases
from verl.utils.logging_setup import setup_logging
from verl.utils.tracking import (
    TRACKERS,
    Tracker,
    Tracking,
    ValidationGenerationsLogger,
    check_backends,
    tracking_folders,
)
from verl.utils.tracking.local import Console, JsonFiles

HOSTED = ["wandb", "mlflow", "swanlab", "trackio"]
METRICS = {"timing/step": 3.25, "actor/loss": torch.tensor(0.234), "reward/mean": np.float64(0.35), "kl/mean": 0.002}


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_console_writes_the_headline_and_a_plain_line_per_group(capsys):
    with Tracking("project", "run") as tracking:
        tracking.log({**METRICS, "critic/lr": 1.0, "timing/gen": 2.0}, step=7)
        tracking.log({"val/a": 1, "val/b": 2}, step=8)
    assert capsys.readouterr().out.splitlines() == [
        "step 7: reward_mean=0.35, kl=0.002, actor_loss=0.234",
        "  critic/lr=1",
        "  timing/gen=2, timing/step=3.25",
        "step 8: val/a=1, val/b=2",
    ]


def test_console_groups_metrics_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    Console(stream=stream).log({"reward/mean": 0.5, "actor/lr": 1e-6, "actor/entropy": 2.0}, step=3)
    first, second = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert "step 3" in first
    assert "reward_mean=0.5" in first
    assert "entropy=2  lr=1e-06" in second


def test_console_line_writes_one_line_per_step_with_notes_and_remaining_time(capsys, monkeypatch):
    clock = itertools.chain((100.0, 110.0), itertools.repeat(130.0))
    monkeypatch.setattr("verl.utils.tracking.local.time.monotonic", lambda: next(clock))
    verl_logger = logging.getLogger("verl")
    monkeypatch.setattr(verl_logger, "handlers", [])
    monkeypatch.setattr(verl_logger, "propagate", verl_logger.propagate)
    setup_logging(console="line")
    logger = logging.getLogger("verl.test")
    with Tracking("project", "run", console="line", total_steps=5) as tracking:
        logger.info("step 1: %s", "math Correct: 1/2", extra={"step_note": "math Correct: 1/2"})
        tracking.log({**METRICS, "critic/lr": 1.0, "timing_s/step": 8.0}, step=1)
        tracking.log({"reward/mean": 0.5}, step=2)
        tracking.log({"reward/mean": 0.75}, step=5)
    logger.info("step 6: %s", "math Correct: 2/2", extra={"step_note": "math Correct: 2/2"})
    logger.warning("late")
    log_startup_phases(False)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "step 1: reward_mean=0.35, kl=0.002, actor_loss=0.234 | math Correct: 1/2 | 8.00 s | ETA 32 s",
        "step 2: reward_mean=0.5 | ETA 30 s",
        "step 5: reward_mean=0.75",
    ]
    assert captured.err.splitlines() == ["step 6: math Correct: 2/2", "WARNING: late"]


def test_file_backend_appends_one_json_object_per_step_at_once(tmp_path):
    tracking = Tracking("project", "run", "file", config={"lr": 1e-6, "nested": {"n": 4}})
    tracking.log({**METRICS, "note": "text"}, step=1)
    file = tmp_path / "runs" / "project" / "run" / "metrics.jsonl"
    (first,) = lines_of(file)  # before close: nothing waits in a buffer
    assert first["step"] == 1
    assert first["data"]["note"] == "text"
    assert first["data"]["reward/mean"] == 0.35
    tracking.log({"a": 1}, step=2)
    tracking.close()
    with Tracking("project", "run", "file") as resumed:
        resumed.log({"a": 2}, step=3)
    assert [line["step"] for line in lines_of(file)] == [1, 2, 3]


def test_trackers_get_the_short_names_too_and_the_console_does_not_repeat_them(tmp_path, capsys):
    step = {
        "reward/mean": 0.5,
        "actor/loss": 0.25,
        "critic/loss": 2.0,
        "kl/mean": 0.01,
        "actor/ppo_ratio": 1.01,
        "actor/grad_norm": 3.0,
        "critic/grad_norm": 4.0,
    }
    short = {
        "reward_mean": 0.5,
        "actor_loss": 0.25,
        "critic_loss": 2.0,
        "kl_divergence": 0.01,
        "ppo_ratio": 1.01,
        "grad_norm": 3.0,
    }
    with Tracking("p", "r", ["console", "file", "tensorboard"]) as tracking:
        tracking.log(step, step=1)
        tracking.log({"actor/loss": 0.5, "grad_norm": 7.0, "actor/grad_norm": 1.0}, step=2)
    first, second = lines_of(tmp_path / "runs/p/r/metrics.jsonl")
    assert first["data"] == step | short
    assert second["data"]["grad_norm"] == 7.0, "a metric that the user logs under this name is kept"
    assert capsys.readouterr().out.count("ppo_ratio=") == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs/p/r"))
    events.Reload()
    assert set(short) <= set(events.Tags()["scalars"])


def test_file_backend_keeps_the_config(tmp_path):
    @dataclasses.dataclass
    class Config:
        lr: float = 0.5
        names: tuple = ("a",)

    for config in (Config(), OmegaConf.create({"lr": 0.5, "names": ["a"]}), {"lr": 0.5, "names": ["a"]}):
        Tracking("project", "run", "file", config=config).close()
        saved = json.loads((tmp_path / "runs" / "project" / "run" / "config.json").read_text())
        assert saved == {"lr": 0.5, "names": ["a"]}


def test_non_finite_metrics_stay_valid_json_and_readable(tmp_path):
    with Tracking("p", "r", "file") as tracking:
        tracking.log({"a": math.nan, "b": -math.inf, "c": torch.tensor([1.5]), "d": np.array([1, 2])}, step=0)
    text = (tmp_path / "runs/p/r/metrics.jsonl").read_text()
    data = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))["data"]
    assert math.isnan(float(data["a"]))
    assert float(data["b"]) == -math.inf
    assert data["c"] == 1.5
    assert data["d"] == [1, 2]


def test_a_killed_run_keeps_its_steps_and_a_torn_line_spoils_only_itself(tmp_path):
    script = (
        "import os, signal; from verl.utils.tracking import Tracking\n"
        "tracking = Tracking('p', 'r', 'file')\n"
        "for step in range(3): tracking.log({'x': step}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = os.getcwd()
    killed = subprocess.run([sys.executable, "-c", script], cwd=root, env=_with_repo_on_path())
    assert killed.returncode == -signal.SIGKILL
    file = tmp_path / "runs/p/r/metrics.jsonl"
    assert [line["step"] for line in lines_of(file)] == [0, 1, 2]
    with file.open("a") as out:
        out.write('{"step": 3, "da')
    with Tracking("p", "r", "file") as resumed:
        resumed.log({"x": 3}, 3)
    lines = file.read_text().splitlines()
    assert lines[3] == '{"step": 3, "da'
    assert json.loads(lines[4])["data"] == {"x": 3}


def _with_repo_on_path() -> dict[str, str]:
    import verl

    repo = os.path.dirname(os.path.dirname(os.path.abspath(verl.__file__)))
    return {**os.environ, "PYTHONPATH": repo}


def test_tensorboard_events_can_be_read_back(tmp_path):
    with Tracking("project", "run", ["tensorboard"], config={"lr": 1e-6}) as tracking:
        tracking.log({"reward/mean": 0.25, "note": "not a number"}, step=1)
        tracking.log({"reward/mean": torch.tensor(0.75)}, step=2)
        tracking.log_generations([("question", "answer", 1.0)], step=2)
        assert not tracking.failures
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs" / "project" / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    texts = events.Tags()["tensors"]
    assert any("config" in tag for tag in texts)
    assert any("val/generations/0" in tag for tag in texts)


def test_several_backends_get_the_same_record(tmp_path, capsys):
    with Tracking("p", "r", ["console", "file", "console"]) as tracking:
        tracking.log({"reward/mean": 1}, 4)
    assert capsys.readouterr().out == "step 4: reward_mean=1\n"
    assert lines_of(tmp_path / "runs/p/r/metrics.jsonl")[0]["data"] == {"reward/mean": 1, "reward_mean": 1}


def test_validation_samples_reach_the_given_tracking_or_backends_by_name(tmp_path, capsys):
    samples = [("2+2?", "4\n" * 300, np.float32(1.0)), ("3+3?", "7", 0.0)]
    logger = ValidationGenerationsLogger("p", "r")
    with Tracking("p", "r", ["console", "file"]) as tracking:
        logger.log(tracking, samples, step=5)
    rows = lines_of(tmp_path / "runs/p/r/generations.jsonl")
    assert rows[1] == {"step": 5, "input": "3+3?", "output": "7", "score": 0.0}
    assert rows[0]["output"] == "4\n" * 300
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert "score=0: 3+3? -> 7" in shown[1]
    assert len(shown[0]) < 300
    logger.log("file", samples[:1], step=6)
    logger.log(["file"], samples[:1], step=7)
    logger.close()
    assert [row["step"] for row in lines_of(tmp_path / "runs/p/r/generations.jsonl")] == [5, 5, 6, 7]


def test_a_backend_that_fails_while_training_is_counted_and_the_others_go_on(monkeypatch, capsys, caplog):
    def full_disk(self: JsonFiles, data: dict, step: int) -> None:
        raise OSError(28, "No space left on device")

    tracking = Tracking("p", "r", ["file", "console"])
    tracking.log({"x": 1}, 1)
    monkeypatch.setattr(JsonFiles, "log", full_disk)
    with caplog.at_level("WARNING", logger="verl"):
        tracking.log({"x": 2}, 2)
    assert tracking.failures == {"file": 1}
    assert "file lost a record" in caplog.text
    assert "step 2: x=2" in capsys.readouterr().out
    tracking.close()
    tracking.close()


def test_a_backend_that_does_not_close_costs_no_run(caplog, monkeypatch):
    def away(backend: Console) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(Console, "close", away)
    with Tracking("p", "r", ["console"]):
        pass
    assert "closing console failed: OSError('no route to host')" in caplog.text


def test_open_trackers_are_closed_if_another_one_cannot_be_opened(tmp_path, monkeypatch):
    class Closable(Tracker):
        closed = False

        def __init__(self, run):
            pass

        def close(self):
            Closable.closed = True

    (tmp_path / "runs").write_text("a file where the folder should be")
    TRACKERS.register("closable")(Closable)
    try:
        with pytest.raises(OSError, match="runs"):
            Tracking("p", "r", ["closable", "file"])
    finally:
        del TRACKERS["closable"]
    assert Closable.closed


def test_unknown_backend_names_the_nearest():
    with pytest.raises(ValueError, match=r"(?s)trainer\.logger.*'tensorbord'.*'tensorboard'"):
        Tracking("p", "r", "tensorbord")
    with pytest.raises(
        ValueError, match=r"^trainer\.logger: .*'zzz'.*console, file, tensorboard, wandb, swanlab, trackio, mlflow\."
    ):
        check_backends(["console", "zzz"])


@pytest.mark.parametrize("name", HOSTED)
def test_a_backend_that_is_not_installed_is_refused_before_anything_opens(name, tmp_path):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ValueError, match=rf"^trainer\.logger: '{name}' .*pip install {name}$"):
        Tracking("p", "r", ["file", name])
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def wandb_package(tmp_path, monkeypatch):
    """A package that only says where the server is; the real one is not needed to decide whether a login exists."""
    package = tmp_path / "packages"
    package.mkdir()
    (package / "wandb.py").write_text("class Settings:\n    base_url = 'https://wandb.example.org'\n")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path
    sys.modules.pop("wandb", None)


def test_wandb_without_login_is_an_error_before_start(wandb_package, monkeypatch):
    with pytest.raises(ValueError, match=r"(?s)wandb\.example\.org.*WANDB_MODE=offline"):
        check_backends(["console", "wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_backends(["console", "wandb"]) == ["console", "wandb"]


def test_wandb_login_is_found_in_the_environment_or_the_netrc_file(wandb_package, monkeypatch):
    netrc_file = wandb_package / ".netrc"
    netrc_file.write_text("machine other.example.org\n login user\n password p\n")
    netrc_file.chmod(0o600)
    with pytest.raises(ValueError, match=r"^trainer\.logger: 'wandb' .*wandb login.*WANDB_API_KEY"):
        check_backends("wandb")
    netrc_file.write_text("machine wandb.example.org\n login user\n password p\n")
    assert check_backends("wandb") == ["wandb"]
    netrc_file.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert check_backends("wandb") == ["wandb"]


def steps_in(file) -> list[tuple[int, dict]]:
    return [(row["step"], row["data"]) for row in map(json.loads, file.read_text().splitlines())]


def test_a_resumed_run_supersedes_the_steps_it_does_again_and_loses_nothing(tmp_path, monkeypatch):
    """Killed after step 5, saved at 3: one line per step, what was there moves aside; a fresh run begins a file."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "p" / "e"

    def log(first: int, values: dict[int, dict]) -> None:
        with Tracking("p", "e", "file", first_step=first) as tracking:
            for step, data in values.items():
                tracking.log(data, step)
                tracking.log_generations([("question", "answer", float(step))], step)

    log(0, {step: {"loss": float(step)} for step in range(6)})
    with (folder / "metrics.jsonl").open("ab") as torn:
        torn.write(b'{"step": 6, "da')
    log(4, {3: {"val": 1.0}, 4: {"loss": 40.0}, 5: {"loss": 50.0}})
    assert steps_in(folder / "metrics.jsonl") == [
        (0, {"loss": 0.0}),
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0}),
        (3, {"loss": 3.0, "val": 1.0}),
        (4, {"loss": 40.0}),
        (5, {"loss": 50.0}),
    ]
    superseded = (folder / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["data"]["loss"] for line in superseded[:2]] == [4.0, 5.0]
    samples = [json.loads(line)["step"] for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert samples == [0, 1, 2, 3, 3, 4, 5]
    log(0, {0: {"val": 0.5}})
    assert steps_in(folder / "metrics.jsonl") == [(0, {"val": 0.5})]
    assert len((folder / "metrics.superseded.jsonl").read_text().splitlines()) == 3 + 6


def test_tensorboard_hides_the_steps_that_are_done_again(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    for first, steps in ((0, range(6)), (4, (4, 5))):
        with Tracking("p", "e", "tensorboard", first_step=first) as tracking:
            for step in steps:
                tracking.log({"loss": float(step + 10 * first)}, step)
    events = EventAccumulator(str(tmp_path / "runs" / "p" / "e"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 44.0), (5, 45.0)]


def test_wandb_goes_on_with_the_same_run_and_a_fresh_one_is_another(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(
        "runs = []\ndef init(**about):\n    runs.append(about)\ndef finish():\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("VERL_RUN", raising=False)
    for first in (0, 4, 0):
        Tracking("p", "e", "wandb", first_step=first).close()
    monkeypatch.setenv("VERL_RUN", "one-command")
    for first in (0, 0, 4):  # started again before its first checkpoint, then after it
        Tracking("p", "e", "wandb", first_step=first).close()
    import wandb

    ids = [about["id"] for about in wandb.runs]
    assert ids[0] == ids[1] != ids[2]
    assert ids[3:] == ["one-command"] * 3
    assert {about["resume"] for about in wandb.runs} == {"allow"}
    sys.modules.pop("wandb")


def test_a_folder_for_trackers_holds_what_all_of_them_write(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    trainer = SimpleNamespace(
        project_name="p", experiment_name="e", logger=["file", "tensorboard"], tracking_dir="mine"
    )
    assert set(tracking_folders(trainer)) == {Path("mine")}
    with Tracking("p", "e", trainer.logger, first_step=0, tracking_dir=trainer.tracking_dir) as tracking:
        tracking.log({"loss": 1.0}, 1)
    assert steps_in(tmp_path / "mine" / "metrics.jsonl") == [(1, {"loss": 1.0})]
    events = EventAccumulator(str(tmp_path / "mine"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == [1.0]
    assert not (tmp_path / "runs").exists()


def test_a_module_of_the_user_adds_a_tracker(tmp_path, monkeypatch):
    (tmp_path / "my_trackers.py").write_text(
        """
from verl.utils.tracking import Tracker, register_tracker

@register_tracker("mine_in_memory", package="json")
class InMemory(Tracker):
    records = []

    def __init__(self, run):
        self.records.append(run.experiment)

    def log(self, data, step):
        self.records.append((step, data["loss"]))

    def log_generations(self, samples, step):
        self.records.append((step, samples[0].output))

    def close(self):
        self.records.append("closed")
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    required = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
    config = load_config(
        {"external_libs": ["my_trackers"]}, ["trainer.logger=[mine_in_memory]", *required], check_files=False
    )
    module = importlib.import_module("my_trackers")
    try:
        with Tracking("p", "run", config.trainer.logger) as tracking:
            tracking.log({"loss": 0.5}, step=3)
            tracking.log_generations([("question", "answer", 1.0)], step=3)
        assert module.InMemory.records == ["run", (3, 0.5), (3, "answer"), "closed"]
    finally:
        del TRACKERS["mine_in_memory"]
