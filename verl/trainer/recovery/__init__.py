"""How runs fail, stop and continue: supervision, hang detection, preemption, non-fatal failures and exit messages."""
