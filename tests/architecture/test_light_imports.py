"""What must import fast imports neither torch nor ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

import verl

HEAVY = ("torch", "ray", "tensordict", "transformers", "datasets", "numpy")
SERVERS = ("starlette", "uvicorn", "pydantic")


LIGHT = (
    "verl",
    "verl.config",
    "verl.cli.plan",
    "verl.planning.report",
    "verl.planning.check",
    "verl.trainer.main_ppo",
    "verl.trainer.constants_ppo",
    "verl.utils",
    "verl.inference.engine",
    "verl.inference.async_engine",
    "verl.model_merger.__main__",
    "verl.cli.main",
    "verl.config.help",
    "verl.cli.listing",
    "verl.cli.doctor",
    "verl.cli.check",
    "verl.cli.init",
)
# Of every scorer process.
WITHOUT_CONFIG = ("verl.utils.process_pool.fork_server", "verl.utils.reward_score.calls")
WITHOUT_SERVERS = ("verl.sandbox.client", "verl.trainer.ppo.ray_trainer", "verl.planning.plan", "verl.agent.worker")


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_modules_import_nothing_heavy():
    program = f"""
import importlib, sys
for module in {WITHOUT_CONFIG!r}:
    importlib.import_module(module)
    assert "verl.config" not in sys.modules, module
for module in {LIGHT!r}:
    importlib.import_module(module)
    assert (heavy := [name for name in {HEAVY!r} if name in sys.modules]) == [], (module, heavy)
"""
    run_python(program)


def test_attributes_of_verl_are_loaded_on_first_use_and_training_imports_neither_servers_nor_the_compiler():
    """The compiler gets the functions that tensordict registers when it is imported after all."""
    program = f"""
import importlib, sys, verl
assert "torch" not in sys.modules
verl.DataProto
assert "torch" in sys.modules
for module in {WITHOUT_SERVERS!r}:
    importlib.import_module(module)
    assert (servers := [name for name in {SERVERS!r} if name in sys.modules]) == [], (module, servers)
    assert "torch._dynamo" not in sys.modules, module

import importlib.util, tensordict.base, tensordict.utils
assert importlib.util.find_spec("torch._dynamo") and "torch._dynamo" not in sys.modules, "found, but not imported"
import torch._dynamo
assert id(tensordict.base._foreach_copy_compiled) in torch._dynamo.trace_rules._allowed_callable_ids
assert tensordict.utils._lock_warn._dynamo_marked_constant
"""
    run_python(program)
    with pytest.raises(AttributeError, match=r"'verl' .*'DataProtto'"):
        _ = verl.DataProtto


def test_the_version_is_known_without_installing_anything_else():
    version = run_python("import verl; print(verl.__version__)")
    assert tuple(int(part) for part in version.split(".")) >= (0, 2, 0)
