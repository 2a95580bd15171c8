"""Trackers of metrics (console, file, TensorBoard, hosted services) behind one `Tracking`."""

from verl.utils.tracking.tracking import (
    Generation,
    TrackedRun,
    Tracker,
    Tracking,
    ValidationGenerationsLogger,
    check_backends,
    register_tracker,
    tracking_folders,
    tracking_problems,
)

__all__ = [
    "Generation",
    "TrackedRun",
    "Tracker",
    "Tracking",
    "ValidationGenerationsLogger",
    "check_backends",
    "register_tracker",
    "tracking_folders",
    "tracking_problems",
]
