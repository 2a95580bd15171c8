"""How every command starts: Hydra composes its configuration, which is checked; problems end it in words."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hydra
from omegaconf import DictConfig

from verl.config import load_config
from verl.config.command_line import prepared_arguments
from verl.config.load import Given, Preflight
from verl.config.schema import Block
from verl.trainer.common.ending import ends_in_words
from verl.utils.logging_setup import setup_logging
from verl.utils.lost_terminal import outlive_terminal

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Block)


def command(
    config_name: str,
    wrong_input: tuple[type[Exception], ...] = (),
    reword: Callable[[str], str] = str,
    interrupted: str = "stopped.",
    sets_up_logging: bool = True,
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Make a function of a configuration the `main()` of a command whose defaults are in `config/<config_name>.yaml`.

    A wrong configuration or wrong data lists every problem and exits with 2; the other arguments are `ends_in_words`'.
    """
    ends = functools.partial(ends_in_words, wrong_input, reword, interrupted)

    def as_main(act: Callable[[DictConfig], Any]) -> Callable[[], None]:
        def told(config: DictConfig) -> None:
            if sets_up_logging:
                setup_logging()
            with ends():  # before Hydra says something of its own
                act(config)

        # By these Hydra finds `config/` beside the command's file, and names the program after it.
        told.__module__ = act.__module__
        told.__code__ = told.__code__.replace(co_filename=act.__code__.co_filename)
        composed = hydra.main(config_path="config", config_name=config_name, version_base=None)(told)

        def main() -> None:
            outlive_terminal()
            with ends(), prepared_arguments(config_name):
                composed()

        main.__doc__ = act.__doc__
        return main

    return as_main


def checked(config: Given, root: type[B], overrides: Sequence[str] = (), preflight: Preflight | None = None) -> B:
    """The whole configuration, or a ConfigError with all of its problems; what the user should know is said."""
    loaded = load_config(config, overrides, root=root, preflight=preflight)
    for notice in loaded.notices:
        logger.warning(notice)
    return loaded
