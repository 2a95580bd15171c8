"""YAML defaults; a package so that Hydra finds them by name (`pkg://verl.trainer.config`)."""
