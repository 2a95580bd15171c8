"""Checkpoints as models that transformers loads: `python -m verl.model_merger merge|test`."""
