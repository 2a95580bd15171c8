"""Shared by tests: tiny models, complete runs, workers, and functions that run in rank processes."""
