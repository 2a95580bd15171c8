"""Commands in error messages: extras by name in a checkout, by their requirements elsewhere."""

import importlib.metadata

import pytest

from verl.config import ConfigError, load_config, problems
from verl.config.problems import install_command

DECLARED = [
    "torch>=2.9",
    'peft>=0.17; extra == "lora"',
    "triton>=3.3; platform_system == 'Linux' and extra == 'gpu'",
    'nvidia-ml-py>=12; extra == "gpu"',
    'sglang!=0.5.18,>=0.5.12; extra == "sglang"',
]


@pytest.fixture
def wheel(monkeypatch):
    monkeypatch.setattr(problems, "IN_CHECKOUT", False)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: DECLARED)


@pytest.mark.parametrize(
    ("command", "elsewhere"),
    [
        ("pip install -e .[lora]", 'pip install "peft>=0.17"'),
        ("pip install -e .[gpu]", 'pip install "triton>=3.3" "nvidia-ml-py>=12"'),
        ("make setup-sglang, or pip install -e .[sglang]", 'pip install "sglang!=0.5.18,>=0.5.12"'),
        ("pip install tensorrt-llm", "pip install tensorrt-llm"),
    ],
)
def test_outside_of_a_checkout_requirements_are_named(command, elsewhere, wheel):
    assert install_command(command) == elsewhere


def test_in_a_checkout_the_extra_is_named():
    assert install_command("pip install -e .[lora]") == "pip install -e .[lora]"


def test_a_missing_engine_names_the_requirements(wheel, monkeypatch):
    monkeypatch.setattr("verl.config.block_rules.is_installed", lambda package: package != "sglang")
    overrides = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=m", "trainer.device=cpu"]
    with pytest.raises(
        ConfigError, match=r'pip install "sglang!=0\.5\.18,>=0\.5\.12".*actor_rollout_ref\.rollout\.name=native'
    ):
        load_config(None, [*overrides, "actor_rollout_ref.rollout.name=sglang"])
