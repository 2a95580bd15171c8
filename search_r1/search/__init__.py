"""Faces of the retriever of Search-R1."""
