"""Tasks, exploits and valid solutions for tests of code rewards."""
