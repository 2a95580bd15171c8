"""Alias of names in `verl.utils.dataset`."""
