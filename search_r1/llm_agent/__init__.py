"""Faces of the generation of Search-R1."""
