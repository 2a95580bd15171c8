"""Roles: workers that implement the algorithm on engines, independent of how an engine computes."""
