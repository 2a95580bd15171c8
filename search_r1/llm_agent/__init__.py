"""Aliases for the generation of Search-R1."""
