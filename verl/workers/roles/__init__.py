"""Roles: what a worker does with an engine. They know the algorithm, not how the engine computes."""
