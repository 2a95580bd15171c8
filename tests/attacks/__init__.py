"""Attack suite: malicious requests, files and programs against the real components (make test-attacks)."""
