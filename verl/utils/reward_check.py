"""`python -m verl.utils.reward_check FILE… [--n 64] [key=value …]`: check a reward function on `n` rows of data files.

The command and the Python function (`check_files`) are implemented in `verl.trainer.data_check_command` and
`verl.trainer.data_check`, the checks themselves in `verl.workers.reward_manager.check`.
"""

import sys

from verl.trainer.data_check import check_reward_function as check_files
from verl.trainer.data_check_command import main_reward as main
from verl.trainer.data_check_command import show_report as show
from verl.workers.reward_manager.check import RewardFinding, RewardReport, RewardRow, check_reward

__all__ = ["RewardFinding", "RewardReport", "RewardRow", "check_files", "check_reward", "main", "show"]

if __name__ == "__main__":
    sys.exit(main())
