"""Face of `verl.trainer.asynchronous`."""
