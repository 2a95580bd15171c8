"""Alias modules for scripts of Search-R1; the implementation is in `verl.agent` and `verl.search`."""
