"""`main_sft` under the name that newer scripts start, with torchrun or without; every answer of a conversation counts.

That is what those scripts expect of `data.messages_key` alone; `data.multiturn=False` takes it back.
"""

from __future__ import annotations

import sys

from verl.trainer import main_sft
from verl.trainer.main_sft import run_sft

__all__ = ["main", "run_sft"]


def main() -> None:
    """Fine-tune a model on answers that are given."""
    sys.argv.insert(1, "data.multiturn=True")
    main_sft.main()


if __name__ == "__main__":
    main()
