"""Reward-model training: batches of compared answers, their loss, what a validation says."""
