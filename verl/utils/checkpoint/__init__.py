"""Training checkpoints as folders: written under a temporary name, checked by manifest, renamed. Needs no torch."""
