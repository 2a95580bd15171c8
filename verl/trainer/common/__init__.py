"""Shared by all trainers: checks before a run, Ray cluster, status, data loading, checkpoints, health of updates."""
