"""`python -m verl.utils.dataset.check FILE… [key=value …]`: check data files for training.

The command and the Python function (`check_files`) are implemented in `verl.trainer.data_check_command` and
`verl.trainer.data_check`.
"""

import sys

from verl.trainer.data_check import check_data as check_files
from verl.trainer.data_check_command import main_data as main

__all__ = ["check_files", "main"]

if __name__ == "__main__":
    sys.exit(main())
