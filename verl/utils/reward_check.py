"""`python -m verl.utils.reward_check FILE… [--n 64] [key=value …]`: can this reward be trusted?

A face: the check itself is `verl.workers.reward_manager.check`, the command `verl.trainer.ppo.reward_check`.
"""

import sys

from verl.trainer.ppo.reward_check import check_files, main, show
from verl.workers.reward_manager.check import Finding, RewardReport, Row, check_reward

__all__ = ["Finding", "RewardReport", "Row", "check_files", "check_reward", "main", "show"]

if __name__ == "__main__":
    sys.exit(main())
