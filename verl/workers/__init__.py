"""Worker roles, the engines they use, and weight sync between engines."""
