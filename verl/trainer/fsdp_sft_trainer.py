"""`main_sft` under the name used by older scripts, with torchrun or without."""

from verl.trainer.main_sft import main, run_sft

__all__ = ["main", "run_sft"]

if __name__ == "__main__":
    main()
