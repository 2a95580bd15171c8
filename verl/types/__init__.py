"""Data types shared by all packages: engine requests, trajectories, batch columns, weights."""
