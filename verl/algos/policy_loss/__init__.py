"""From advantages to a loss: one file per policy loss, which declares its name and traits."""
