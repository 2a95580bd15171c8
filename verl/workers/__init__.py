"""Roles, the engines they compose, and how weights and batches move between them."""
