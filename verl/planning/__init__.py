"""What a run needs of devices and hosts, planned before it starts, and what to change where that is too much."""
