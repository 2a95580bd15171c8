"""The RL training loop: the trainer, its rewards and metrics, and the algorithms under the names users know."""
