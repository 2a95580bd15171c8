"""Rows on disk to model inputs: prompts for RL, conversations for supervised training, and what is checked first."""
