"""`verl init NAME`: create a starter project from the files in `starter/`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_STARTER = Path(__file__).with_name("starter")
_NEXT_STEPS = """created {folder}: {files}

  cd {folder}
  python test_reward.py      # tests of the reward and the tool
  bash run.sh                # trains a tiny model on a CPU, in minutes and without downloads
  bash run.sh check          # what the model sees, which tokens are trained, how answers score

README.md explains what to change for a real model.
"""


def main(arguments: Sequence[str]) -> int:
    """Create the project; return 2 if the folder is in use."""
    parser = argparse.ArgumentParser(
        prog="verl init", description="Create a starter project: data, a reward, a tool, a run script and a test."
    )
    parser.add_argument("name", metavar="NAME", help="the folder to create")
    folder = Path(parser.parse_args(arguments).name).expanduser()
    try:
        create_project(folder)
    except OSError as error:
        sys.stderr.write(f"verl init: {error}\n")
        return 2
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    sys.stdout.write(_NEXT_STEPS.format(folder=folder, files=files))
    return 0


def create_project(folder: Path) -> None:
    """Copy the starter files to a new folder. Raises FileExistsError if `folder` is a file or not empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty. Choose another name, or delete it.")
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(path for path in _STARTER.iterdir() if path.is_file()):
        shutil.copyfile(source, folder / source.name)
