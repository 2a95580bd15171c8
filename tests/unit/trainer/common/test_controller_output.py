"""Lines of actors are printed without Ray's prefix; those of the controller in order and complete."""

import os

import pytest
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from verl.trainer.common import status_display
from verl.trainer.common.status_display import ControllerOutput, end_controller_output, without_prefixes


@pytest.fixture
def printed_by_ray(monkeypatch):
    printed: list[dict] = []
    monkeypatch.setattr(dispatcher, "handlers", [("ray_print_logs", printed.append)])
    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)
    return printed


def lines_of(actor: str, *lines: str, is_err: bool = False, pid: int | str = 7, ip: str = "10.0.0.1") -> dict:
    return {
        "actor_name": actor,
        "pid": pid,
        "ip": ip,
        "localhost": "10.0.0.1",
        "job": "01",
        "lines": list(lines),
        "is_err": is_err,
    }


def test_lines_of_the_controller_come_as_written(printed_by_ray, capsys):
    output = ControllerOutput("TaskRunner")
    output.wait_for_end(timeout=3600.0)  # nothing was written: nothing is awaited
    dispatcher.emit(lines_of("TaskRunner", "step 1: reward_mean=0.5", "  indented"))
    dispatcher.emit(lines_of("TaskRunner", "a warning", is_err=True))
    assert tuple(capsys.readouterr()) == ("step 1: reward_mean=0.5\n  indented\n", "a warning\n")
    assert printed_by_ray == []
    assert os.environ["RAY_COLOR_PREFIX"] == "0", "stdout is no terminal"
    dispatcher.remove_handler("ray_print_logs")  # as Ray does when it disconnects
    assert dispatcher.handlers == []
    assert output.has_started


def test_the_end_of_the_output_can_be_awaited(printed_by_ray, capsys):
    output = ControllerOutput("TaskRunner")
    end_controller_output()
    marker = capsys.readouterr().out.strip()
    assert not output.ended.is_set()
    dispatcher.emit(lines_of("TaskRunner", "last line", marker))
    output.wait_for_end(timeout=60.0)
    assert output.ended.is_set()
    assert capsys.readouterr().out == "last line\n"


def test_without_output_of_actors_nothing_is_awaited(monkeypatch):
    monkeypatch.setattr(dispatcher, "handlers", [])
    monkeypatch.setattr(status_display, "END_TIMEOUT_S", 3600.0)
    output = ControllerOutput("TaskRunner")
    output.wait_for_end()
    assert dispatcher.handlers == []


def test_lines_of_workers_have_neither_prefix_nor_colours(printed_by_ray, capsys):
    output = ControllerOutput("TaskRunner")
    dispatcher.emit(lines_of("RayRankHost", "\x1b[33mWARNING: slow\x1b[0m", is_err=True))
    dispatcher.emit(lines_of("RayRankHost", "from another node", ip="10.0.0.2"))
    assert tuple(capsys.readouterr()) == ("10.0.0.2: from another node\n", "WARNING: slow\n")
    raylet = lines_of("", "a worker died", pid="raylet")
    dispatcher.emit(raylet)
    assert printed_by_ray == [raylet], "messages of Ray itself are left to Ray"
    output.wait_for_end()


def test_equal_lines_of_several_workers_are_printed_once_and_counted(printed_by_ray, capsys):
    with without_prefixes():
        for pid in range(4):
            dispatcher.emit(lines_of("RayRankHost", "loading weights", pid=pid))
        assert capsys.readouterr().out == "loading weights\n"
    counted = capsys.readouterr().out
    assert counted.startswith("loading weights [repeated 3x across cluster]")
    assert "\x1b" not in counted
