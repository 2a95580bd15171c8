"""From advantages to a loss: one file per policy loss, whose row in `verl.config.names` makes it known."""
