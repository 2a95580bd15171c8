"""The configurations that can be loaded whole: each a root block, the YAML file of its defaults, and its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.config import (
    asynchronous,
    files,
    generation_rules,
    idle,
    resolve,
    reward,
    rm_rules,
    sft,
    sft_rules,
    validate,
)
from verl.config.generation import EvalConfig, GenerationConfig
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.rm import RMConfig
from verl.config.schema import Block

# Called with the config (a `Root.cls`) and the report; a table of several config types cannot say that in types.
Rule = Callable[[Any, Report], None]


@dataclass(frozen=True)
class Root:
    """One program's configuration."""

    cls: type[Block]
    yaml: str  # the file in verl/trainer/config, without its ending
    resolve: Rule  # nulls become what they stand for
    validate: Rule  # rules between keys
    check_environment: Rule  # what must exist on this machine
    check_built: Rule = lambda config, report: None  # what this version cannot do yet; said before anything else
    old_spellings: Rule = lambda values, report: None  # of plain values: keys whose numbers meant something else


def _old_spellings(values: dict[str, Any], report: Report) -> None:
    asynchronous.old_spellings(values, report)
    reward.old_spellings(values, report)


PPO = Root(
    PPOConfig,
    "ppo_trainer",
    resolve.resolve,
    validate.validate,
    files.check_environment,
    idle.check_built,
    _old_spellings,
)
SFT = Root(
    sft.SFTConfig,
    "sft_trainer",
    sft_rules.resolve,
    sft_rules.validate,
    sft_rules.check_environment,
    old_spellings=sft.old_spellings,
)
RM = Root(RMConfig, "rm_trainer", rm_rules.resolve, rm_rules.validate, rm_rules.check_environment)
GENERATION = Root(
    GenerationConfig,
    "generation",
    generation_rules.resolve_generation,
    generation_rules.validate_generation,
    generation_rules.check_generation,
)
EVAL = Root(
    EvalConfig, "evaluation", generation_rules.resolve_eval, generation_rules.validate_eval, generation_rules.check_eval
)
ROOTS = (PPO, SFT, RM, GENERATION, EVAL)


def root_of(cls: type[Block]) -> Root:
    """The program whose whole configuration is a `cls`."""
    for root in ROOTS:
        if root.cls is cls:
            return root
    known = ", ".join(root.cls.__name__ for root in ROOTS)
    raise ValueError(f"root: {cls.__name__} is a block, not a whole configuration. Use one of {known}.")
