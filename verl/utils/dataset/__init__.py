"""Datasets: rows of files as model inputs (prompts for RL, conversations for supervised training), and their checks."""
