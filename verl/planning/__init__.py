"""Memory plan of a run on devices and hosts before it starts, and the config changes that make it fit."""
