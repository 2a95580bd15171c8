"""Where metrics go: console, file, tensorboard and hosted trackers behind one `Tracking`."""

from verl.utils.tracking.tracking import (
    Tracking,
    ValidationGenerationsLogger,
    check_backends,
    tracking_folders,
    tracking_problems,
)

__all__ = ["Tracking", "ValidationGenerationsLogger", "check_backends", "tracking_folders", "tracking_problems"]
