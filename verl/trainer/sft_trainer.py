"""`main_sft` under the name used by newer scripts, with torchrun or without, and with `data.multiturn=True`.

Those scripts expect to train every assistant message of `data.messages_key`; `data.multiturn=False` overrides it.
"""

from __future__ import annotations

import sys

from verl.trainer import main_sft
from verl.trainer.main_sft import run_sft

__all__ = ["main", "run_sft"]


def main() -> None:
    """Fine-tune a model on given responses."""
    sys.argv.insert(1, "data.multiturn=True")
    main_sft.main()


if __name__ == "__main__":
    main()
