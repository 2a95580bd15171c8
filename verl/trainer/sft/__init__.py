"""Supervised fine-tuning: data, loop, checkpoints."""
