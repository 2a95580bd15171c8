"""The small leaves: device, containers, positions, metrics, logging, and that importing them stays light."""

import io
import logging
import math
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.utils import device
from verl.utils.logging_setup import setup_logging
from verl.utils.metric import reduce_metrics
from verl.utils.model import compute_position_id_with_mask
from verl.utils.py_functional import append_to_dict, timeout_limit

LIGHT = [
    "verl.utils",
    "verl.utils.balancing",
    "verl.utils.device",
    "verl.utils.fs",
    "verl.utils.hdfs_io",
    "verl.utils.import_utils",
    "verl.utils.logging_setup",
    "verl.utils.metric",
    "verl.utils.model",
    "verl.utils.py_functional",
    "verl.utils.tokenizer",
    "verl.utils.tracking",
]


def test_importing_the_leaves_imports_no_heavy_package():
    heavy = ("torch", "ray", "transformers", "fsspec", "huggingface_hub", "tensorboard", "wandb", "mlflow", "rich")
    script = f"import sys, {', '.join(LIGHT)}\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_device_names_module_and_id_agree_with_torch():
    name = "cuda" if torch.cuda.is_available() else "cpu"
    assert device.get_device_name() == name
    assert device.get_torch_device() is getattr(torch, name)
    assert device.is_cuda_available is torch.cuda.is_available()
    assert torch.zeros(1).to(device.get_device_id()).device.type == name
    with pytest.raises(AttributeError, match="is_npu_available"):
        device.is_npu_available  # noqa: B018


def test_append_to_dict_collects_scalars_and_extends_lists():
    data: dict = {"a": [1]}
    append_to_dict(data, {"a": 2, "b": [3, 4], "c": (1.0, 2)})
    append_to_dict(data, {"b": 5})
    assert data == {"a": [1, 2], "b": [3, 4, 5], "c": [(1.0, 2)]}


@pytest.mark.parametrize(("inner_limit", "seconds"), [(0.4, 0), (100.0, 3)])
def test_a_call_with_a_time_limit_keeps_the_limit_of_the_call_around_it(inner_limit, seconds):
    @timeout_limit(inner_limit, use_signals=True)
    def inner():
        time.sleep(seconds)

    @timeout_limit(0.6, use_signals=True)
    def outer():
        inner()
        time.sleep(3)

    with pytest.raises(TimeoutError, match=r"^outer "):
        outer()


def test_a_call_with_a_time_limit_keeps_the_timer_of_other_code():
    @timeout_limit(0.5, use_signals=True)
    def limited(seconds):
        time.sleep(seconds)

    times = []
    before = signal.signal(signal.SIGALRM, lambda *_: times.append(time.monotonic()))
    try:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.3)
        with pytest.raises(TimeoutError, match=r"^limited "):
            limited(3)
        assert 0.1 <= times[0] - start < 0.35, "at its time, during the call"
        count, (remaining, interval) = len(times), signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining <= 0.3
        assert interval == pytest.approx(0.3)
        time.sleep(0.7)
        assert len(times) > count, "after the call"
        signal.setitimer(signal.ITIMER_REAL, 60, 30)
        limited(0)
        remaining, interval = signal.getitimer(signal.ITIMER_REAL)
        assert (50 < remaining <= 60, interval) == (True, 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def alarm_handler():
    """Install a handler of SIGALRM; afterwards the timer is stopped and the handler of before is installed."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda handler: signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_periodic_timer_that_expires_often_during_a_call_in_c(alarm_handler):
    calls = []
    alarm_handler(lambda *_: calls.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)

    @timeout_limit(100.0, use_signals=True)
    def limited():
        return sum(range(10**7))

    assert limited() == sum(range(10**7))
    assert calls
    assert signal.getitimer(signal.ITIMER_REAL)[1] == pytest.approx(0.01)


def test_a_handler_that_installs_itself_again_does_not_end_the_limit(alarm_handler):
    def handler(*_):
        alarm_handler(handler)

    alarm_handler(handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)

    @timeout_limit(0.5, use_signals=True)
    def limited():
        time.sleep(10)

    with pytest.raises(TimeoutError):
        limited()
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("installs_itself", [False, True])
def test_nested_limits_keep_a_periodic_timer(alarm_handler, levels, installs_itself):
    calls = []

    def handler(*_):
        calls.append(time.monotonic())
        if installs_itself:
            alarm_handler(handler)

    def nested(level):
        if level:
            timeout_limit(100.0, use_signals=True)(nested)(level - 1)
        else:
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                time.sleep(0.01)

    alarm_handler(handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    nested(levels)
    assert 2 <= len(calls) <= 5
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[1] == pytest.approx(0.1)


def test_equal_limits_name_the_outer_call():
    @timeout_limit(0.3, use_signals=True)
    def inner():
        end = time.monotonic() + 10
        while time.monotonic() < end:
            time.sleep(0.01)

    @timeout_limit(0.2, use_signals=True)
    def outer():
        inner()

    with pytest.raises(TimeoutError, match="outer"):
        outer()


def test_the_handler_of_a_timer_may_set_it_again_or_raise():
    def handler(*_):
        times.append(time.monotonic())
        if len(times) == 3:
            raise KeyError("third")
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    @timeout_limit(100.0, use_signals=True)
    def limited():
        time.sleep(10)

    times = []
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyError, match="third"):
            limited()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_positions_count_attended_tokens_only():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert compute_position_id_with_mask(mask.bool()).dtype == torch.long


def test_metrics_reduce_by_mean_max_and_min_of_the_key():
    metrics = {
        "actor/loss": [1.0, torch.tensor(3.0)],
        "response_length/max": [1, 7, 3],
        "score/min": [np.float32(4), 2],
        "actor/lr": 0.5,
        "nothing": [],
    }
    assert reduce_metrics(metrics) == {"actor/loss": 2, "response_length/max": 7, "score/min": 2, "actor/lr": 0.5}


@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(0, 9)), min_size=1, max_size=8))
def test_sum_count_pairs_weigh_by_count_and_nothing_counted_is_zero(pairs):
    total, count = (sum(part) for part in zip(*pairs, strict=True))
    assert reduce_metrics({"m": pairs})["m"] == pytest.approx(total / count if count else 0.0)
    assert reduce_metrics({"m": pairs[0]})["m"] == pytest.approx(pairs[0][0] / pairs[0][1] if pairs[0][1] else 0.0)


def test_nan_is_not_hidden_by_max_or_min():
    for key in ("x/max", "x/min", "x/mean"):
        assert math.isnan(reduce_metrics({key: [1.0, math.nan, 2.0]})[key])


def test_mixed_pairs_and_numbers_are_refused():
    with pytest.raises(ValueError, match=r"^actor/loss: .*\[1\.0, \(2\.0, 3\)\]"):
        reduce_metrics({"actor/loss": [1.0, (2.0, 3)]})


@pytest.fixture
def restored_logger():
    logger = logging.getLogger("verl")
    before = (logger.level, list(logger.handlers), logger.propagate)
    yield logger
    logger.level, logger.handlers, logger.propagate = before
    logging.getLogger("verl.child").manager._clear_cache()


def test_logging_writes_plain_lines_once_however_often_it_is_set_up(restored_logger):
    stream = io.StringIO()
    for _ in range(3):
        setup_logging("INFO", stream)
    logging.getLogger("verl.child").info("hello %d", 1)
    logging.getLogger("verl.child").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("INFO verl.child: hello 1")


def test_logging_level_comes_from_the_environment(restored_logger, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "warn")
    setup_logging(stream=stream)
    logging.getLogger("verl.child").info("quiet")
    logging.getLogger("verl.child").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "15")
    assert setup_logging(stream=stream).level == 15
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "chatty")
    with pytest.raises(ValueError, match=r"(?s)VERL_LOGGING_LEVEL.*'chatty'"):
        setup_logging(stream=stream)


def test_logging_uses_rich_on_a_terminal(restored_logger):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    setup_logging("INFO", stream)
    logging.getLogger("verl.child").info("[bold]hello")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert "INFO     [bold]hello" in shown  # a message is text, not markup
    assert type(restored_logger.handlers[0]).__name__ == "RichHandler"
