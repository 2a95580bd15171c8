"""Faces: what scripts of Search-R1 import. The work is in `verl.agent` and `verl.search`."""
