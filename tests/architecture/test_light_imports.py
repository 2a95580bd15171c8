"""What must import fast imports neither torch nor ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

import verl

HEAVY = ("torch", "ray", "tensordict", "transformers", "datasets", "numpy")
SERVERS = ("starlette", "uvicorn", "pydantic")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("verl", HEAVY),
        ("verl.config", HEAVY),
        ("verl.cli.plan, verl.planning.report, verl.planning.check", HEAVY),
        ("verl.trainer.main_ppo", HEAVY),
        ("verl.trainer.constants_ppo", HEAVY),
        ("verl.utils", HEAVY),
        ("verl.inference.engine", HEAVY),
        ("verl.inference.async_engine", HEAVY),
        ("verl.model_merger.__main__", HEAVY),
        ("verl.cli.main, verl.config.help, verl.cli.listing, verl.cli.doctor, verl.cli.check, verl.cli.init", HEAVY),
        ("verl.trainer.ppo.ray_trainer, verl.planning.plan, verl.agent.worker", SERVERS),
        ("verl.sandbox.client", SERVERS),
    ],
)
def test_module_imports_nothing_heavy(module, heavy):
    program = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_attributes_of_verl_are_loaded_on_first_use():
    program = "import verl, sys; assert 'torch' not in sys.modules; verl.DataProto; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'DataProtto'"):
        _ = verl.DataProtto


def test_the_version_is_known_without_installing_anything_else():
    done = subprocess.run(
        [sys.executable, "-c", "import verl; print(verl.__version__)"], capture_output=True, text=True, check=True
    )
    assert tuple(int(part) for part in done.stdout.strip().split(".")) >= (0, 2, 0)
