"""The controller: entry points, the training loop and its configuration files."""
