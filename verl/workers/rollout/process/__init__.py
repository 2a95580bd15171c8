"""An engine in a process of its own: its proxy here, its host there, and what goes between them."""
