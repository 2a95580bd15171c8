"""The run that `verl check` and `verl plan` examine: its program, the user's YAML file and the overrides."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.cli.main import PROGRAMS, unknown_name

# YAML file with the defaults of each program.
YAML_FILES = {name: f"{'ppo' if name == 'train' else name}_trainer" for name in PROGRAMS}
_NAME = re.compile(r"[A-Za-z]\w*")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a run."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="[train|sft|rm] key=value",
        help="program of the run (default: train) and its overrides",
    )
    parser.add_argument("--config-path", "-cp", help="folder of your YAML file, as for the run")
    parser.add_argument("--config-name", "-cn", help="name of your YAML file")


def parse_run_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; `program` is train, sft or rm. Exits with code 2 for an unknown program."""
    options = parser.parse_intermixed_args(list(arguments))
    options.program = "train"
    if options.overrides and _NAME.fullmatch(options.overrides[0]):
        options.program = options.overrides.pop(0)
        if options.program not in PROGRAMS:
            parser.exit(2, unknown_name("program", options.program, PROGRAMS))
    return options


def compose_user_file(options: argparse.Namespace) -> Any:
    """Return the user's YAML file with the overrides, composed by Hydra as in the run; None without a YAML file."""
    flags = {"--config-path": options.config_path, "--config-name": options.config_name}
    selected = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
    if not selected:
        return None
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    from verl.config.command_line import hydra_arguments
    from verl.config.compose import CONFIG_DIR

    yaml = YAML_FILES[options.program]
    folder = Path(options.config_path or CONFIG_DIR).expanduser().absolute()
    overrides = hydra_arguments([*selected, *options.overrides], yaml)[: -len(selected)]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose((options.config_name or yaml).removesuffix(".yaml"), overrides)
    except HydraException as error:
        raise ValueError(f"--config-path, --config-name: {error}") from error
