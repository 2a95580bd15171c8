"""Alias of a program of `verl.trainer.asynchronous`."""
