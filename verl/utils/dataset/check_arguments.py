"""The command line that `verl.utils.dataset.check` and `verl.utils.reward_check` share.

Both take data files, keys of a training run (`data.prompt_key=question`) and options; some keys can also be
written as options (`--prompt-key question`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from verl.config import PPOConfig, load_config

_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.[\w-]+)*=")
_FILES = "data.train_files"
_MODEL = "actor_rollout_ref.model.path"
# Option -> the key it is another spelling of.
_KEYS = {
    "model": _MODEL,
    "prompt_key": "data.prompt_key",
    "reward_fn_key": "data.reward_fn_key",
    "ground_truth_key": "data.ground_truth_key",
}
_UNUSED = "unused"


@dataclass(frozen=True)
class CheckArguments:
    """The parsed arguments of both commands: files, the configuration of the run, and how many rows to use."""

    files: list[str]
    overrides: list[str]
    config: PPOConfig
    limits: list[int]
    """Prompt lengths to compare with."""
    custom_reward: bool
    """A reward function of the user takes any data source."""
    n: int | None
    """Rows to score; None: the command's default, 0: all."""
    seed: int
    samples: int

    @property
    def model(self) -> str | None:
        path = self.config.actor_rollout_ref.model.path
        return None if path == _UNUSED else path


def read_arguments(program: str, description: str, arguments: Sequence[str] | None) -> CheckArguments:
    """Parse the command line of one of the two commands. Raises ValueError (ConfigError) for invalid arguments."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Removed before argparse: options with several values would consume them.
    overrides = [word for word in words if _OVERRIDE.match(word)]
    options = _parser(program, description).parse_intermixed_args([word for word in words if word not in overrides])
    overrides += [f"{key}={getattr(options, name)}" for name, key in _KEYS.items() if getattr(options, name)]
    files = options.files
    limits = options.max_prompt_length or []
    if limits:
        overrides.append(f"data.max_prompt_length={max(limits)}")
    base = {"data": {"train_files": files}, "actor_rollout_ref": {"model": {"path": _UNUSED}}}
    if not files and not any(word.lstrip("+").startswith(f"{_FILES}=") for word in overrides):
        raise ValueError(f"no data file is given. Write: python -m {program} FILE [key=value …]")
    config = load_config(base, overrides, check_files=False)
    return CheckArguments(
        files=files or config.data.train_files,
        overrides=overrides,
        config=config,
        limits=limits or [config.data.max_prompt_length],
        custom_reward=options.custom_reward or config.custom_reward_function.path is not None,
        n=options.n,
        seed=options.seed,
        samples=options.samples,
    )


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "files",
        nargs="*",
        help="parquet, arrow, json or jsonl files, folders or hub names; and keys of the run (key=value)",
    )
    parser.add_argument("--model", help=f"tokenizer to count prompt tokens with; {_MODEL}")
    for name in ("prompt", "reward-fn", "ground-truth"):
        parser.add_argument(f"--{name}-key", help=f"data.{name.replace('-', '_')}_key")
    parser.add_argument(
        "--max-prompt-length", type=int, nargs="+", help="limits to compare with; data.max_prompt_length"
    )
    parser.add_argument("--custom-reward", action="store_true", help="a reward function of yours takes any data_source")
    parser.add_argument("--n", "--score-rows", type=int, help="rows to score (dataset.check: per data source); 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of rows (reward_check)")
    parser.add_argument("--samples", type=int, default=2, help="rows to print (dataset.check)")
    return parser
