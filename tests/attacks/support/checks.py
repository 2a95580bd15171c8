"""What every server must do under attack."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.attacks.support.campaign import Figures

__all__ = ["check_figures"]

_HEALTH_S = 0.3
_PEAK_MB = 3_072
"""Above the idle level: the bodies of large requests (512 MB), their parsers (1 GB) and programs of the sandbox."""


def check_figures(figures: Figures) -> None:
    """Assert every requirement at once, so that one run shows all that is wrong."""
    if "ATTACK_FIGURES" in os.environ:
        with Path(os.environ["ATTACK_FIGURES"]).open("a") as file:
            file.write(json.dumps(figures.to_json()) + "\n")
    failures = [
        f"{len(figures.problems)} of {figures.attacks} attacks have an unacceptable outcome"
        if figures.problems
        else "",
        f"/health failed {len(figures.health_failures)} times" if figures.health_failures else "",
        f"/health took up to {figures.health_s['max']} s ({figures.own_health_s['max']} s with a CPU), an idle server "
        f"{figures.control_s['max']} s"
        if figures.health_s["max"] > _HEALTH_S
        else "",
        f"memory: {figures.memory_mb}, allowed afterwards: {figures.allowed_memory_mb:.0f}"
        if figures.memory_mb["after"] > figures.allowed_memory_mb
        else "",
        f"memory: {figures.memory_mb}, allowed above the idle level: {_PEAK_MB}"
        if figures.memory_mb["peak"] > figures.memory_mb["before"] + _PEAK_MB
        else "",
        f"processes: {figures.processes}" if figures.processes["after"] > figures.processes["before"] else "",
        f"open descriptors: {figures.descriptors}, allowed afterwards: {figures.allowed_descriptors}"
        if figures.descriptors["after"] > figures.allowed_descriptors
        else "",
        f"regular clients: {figures.regular}" if figures.regular_problems or not figures.regular["ok"] else "",
        f"processes after the end: {figures.left_processes}" if figures.left_processes else "",
        f"stopping: {figures.stop}" if figures.stop["exit_code"] != 0 else "",
        f"errors in the log: {figures.log_errors[:3]}" if figures.log_errors else "",
    ]
    failures = [failure for failure in failures if failure]
    assert not failures, "\n".join([*failures, "", _details(figures)])


def _details(figures: Figures) -> str:
    """The first problems; all of them are in the file that ATTACK_FIGURES names."""
    shown = [*figures.problems[:20], *figures.regular_problems[:5], *figures.health_failures[:3]]
    return "\n".join([*shown, *(f"/health {seconds} s during {names}" for seconds, names in figures.slow_health[:3])])
