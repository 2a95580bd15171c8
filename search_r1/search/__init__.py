"""Aliases for the retriever of Search-R1."""
