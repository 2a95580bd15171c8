"""Training checkpoints as folders: written beside, checked by manifest, renamed into place. Needs no torch."""
