"""Faces of `verl.utils.dataset`."""
