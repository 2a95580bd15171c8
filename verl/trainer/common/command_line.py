"""Entry points of commands: Hydra composes the configuration, which is validated; errors exit with a message."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hydra
from omegaconf import DictConfig

from verl.config import load_config
from verl.config.command_line import prepared_arguments, program_name
from verl.config.help import find_program, requested_help, show_help
from verl.config.load import ConfigInput, Preflight
from verl.config.schema import Block
from verl.trainer.recovery.exit_messages import exit_with_message
from verl.utils.console import FULL, LINE, show_startup, startup_phase
from verl.utils.logging_setup import setup_logging, survive_lost_terminal

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Block)


def command(
    config_name: str,
    invalid_input: tuple[type[Exception], ...] = (),
    reword: Callable[[str], str] = str,
    interrupted: str = "stopped.",
    sets_up_logging: bool = True,
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Decorator: convert a function that takes a configuration to the `main()` of a command, with defaults from
    `config/<config_name>.yaml`.

    If the configuration or the data is invalid, the command prints every problem and exits with 2. `invalid_input`,
    `reword`, `interrupted`: see `exit_with_message`.
    """
    exits = functools.partial(exit_with_message, invalid_input, reword, interrupted)

    def as_main(act: Callable[[DictConfig], Any]) -> Callable[[], None]:
        def run(config: DictConfig) -> None:
            if sets_up_logging:
                setup_logging(console=console_mode(config) if "trainer" in config else FULL)
            with exits():  # inside of Hydra, which would print its own message
                act(config)

        # Hydra uses both attributes to find `config/` beside the command's file, and to name the program.
        run.__module__ = act.__module__
        run.__code__ = run.__code__.replace(co_filename=act.__code__.co_filename)
        composed = hydra.main(config_path="config", config_name=config_name, version_base=None)(run)

        def main() -> None:
            survive_lost_terminal()
            if (blocks := requested_help(sys.argv[1:])) is not None:
                sys.exit(show_help(find_program(config_name), blocks, program_name(act.__module__)))
            with exits(), prepared_arguments(config_name):
                composed()

        main.__doc__ = act.__doc__
        return main

    return as_main


def console_mode(config: ConfigInput) -> str:
    """Return `trainer.console` of a configuration that has not been validated: `full`, or in all other cases `line`."""
    try:
        value = config["trainer"]["console"]  # type: ignore[index]
    except (AttributeError, KeyError, TypeError):
        value = None
    return FULL if value == FULL else LINE


def validated_config(
    config: ConfigInput, root: type[B], overrides: Sequence[str] = (), preflight: Preflight | None = None
) -> B:
    """Validate a configuration, log its notices and return it. Raises ConfigError with all problems."""
    with show_startup(console_mode(config) == LINE), startup_phase("configuration"):
        loaded = load_config(config, overrides, root=root, preflight=preflight)
    for notice in loaded.notices:
        logger.warning(notice)
    return loaded
