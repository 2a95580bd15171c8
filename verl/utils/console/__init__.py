"""Console output: one line per step, start-up phases, and a status line on a terminal."""
