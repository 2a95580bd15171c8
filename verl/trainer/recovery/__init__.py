"""How runs fail, stop and continue: supervision, hang detection, preemption, non-fatal failures and exit messages.

Restart and readmission of lost workers within a run: `verl/trainer/ppo/worker_recovery.py`.
"""
