"""Traits of extensions are read from their files without importing them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl.config import ConfigError, load_config, names
from verl.config.names import read_user_declarations

REQUIRED = ("data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m")
ESTIMATOR = """
import torch_is_not_needed_to_read_this
from verl.algos import register_adv_est

@register_adv_est("{name}", uses_groups=True, needs_critic=False)
def compute_mine(token_level_rewards, response_mask, index):
    return token_level_rewards, token_level_rewards
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that nothing has imported; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"extension_{abs(hash((str(tmp_path), source)))}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def test_traits_of_a_users_estimator_are_known_before_its_module_is_imported(module):
    name = module(ESTIMATOR.format(name="mine_with_groups"))
    config = load_config(
        {"external_libs": [name]}, ["algorithm.adv_estimator=mine_with_groups", *REQUIRED], check_files=False
    )
    assert config.actor_rollout_ref.rollout.n > 1
    assert config.critic.enable is False
    assert name not in sys.modules


def test_a_rule_about_a_trait_holds_for_a_users_estimator(module):
    name = module(ESTIMATOR.format(name="mine_in_groups_of_one"))
    with pytest.raises(ConfigError) as error:
        load_config(
            {"external_libs": [name]},
            ["algorithm.adv_estimator=mine_in_groups_of_one", "actor_rollout_ref.rollout.n=1", *REQUIRED],
            check_files=False,
        )
    assert "actor_rollout_ref.rollout.n" in str(error.value)


def test_an_estimator_without_traits_may_do_anything(module):
    read_user_declarations([module('@register_adv_est("plain")\ndef compute_plain(): ...\n')])
    assert names.estimator_traits("plain") == names.estimator_traits("never declared")


def test_an_unknown_trait_names_the_file_and_the_known_ones(module):
    name = module('@register_adv_est("typo", use_groups=True)\ndef compute_typo(): ...\n')
    with pytest.raises(ValueError, match=rf"{name}\.py.*use_groups.*uses_groups"):
        read_user_declarations([name])


def test_a_wrong_declaration_is_a_problem_of_external_libs_beside_the_others(module):
    name = module('@register_adv_est("another_typo", use_groups=True)\ndef compute_typo(): ...\n')
    with pytest.raises(ConfigError) as error:
        load_config({}, [f"external_libs=[{name}]", "algorithm.adv_estimator=another_typo"], check_files=False)
    assert "external_libs: " in str(error.value)
    assert "data.train_files" in str(error.value)


def test_a_single_module_need_not_be_a_list(module):
    name = module(ESTIMATOR.format(name="mine_alone"))
    overrides = ["algorithm.adv_estimator=mine_alone", *REQUIRED]
    assert load_config({"external_libs": name}, overrides, check_files=False).actor_rollout_ref.rollout.n > 1


def test_modules_are_read_as_lists_of_strings(module):
    overrides = ["algorithm.adv_estimator=mine_in_text", *REQUIRED]
    libraries = f"[{module(ESTIMATOR.format(name='mine_in_text'))}]"
    assert load_config({"external_libs": libraries}, overrides, check_files=False).actor_rollout_ref.rollout.n > 1
    assert load_config({"external_libs": 5}, REQUIRED, check_files=False).external_libs == ["5"]
    with pytest.raises(ConfigError, match="external_libs"):
        load_config({"external_libs": [None]}, REQUIRED, check_files=False)


def test_a_trait_that_is_no_literal_names_the_line(module):
    name = module('KEYS = ()\n@register_adv_est("computed", reads=KEYS)\ndef compute_computed(): ...\n')
    with pytest.raises(ValueError, match=rf"{name}\.py: line 2"):
        read_user_declarations([name])


def test_a_module_that_does_not_exist_is_left_to_the_import():
    read_user_declarations(["no_such_package.module", "json.no_such_module"])


def test_reading_the_tables_imports_no_torch():
    code = "import sys; from verl.config import names; assert names.ADV_ESTIMATORS['gae'].needs_critic; "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


ENGINE = """
import torch_is_not_needed_to_read_this
from verl.workers.rollout import register_rollout

@register_rollout("{name}", reports=("full",){more})
class MyRollout: ...
"""


def test_a_users_rollout_engine_is_selected_by_name(module):
    """With a `package` it is a third-party engine, which gets its own process."""
    lib = module(ENGINE.format(name="my_engine", more=""))
    overrides = ["actor_rollout_ref.rollout.name=my_engine", *REQUIRED]
    config = load_config({"external_libs": [lib]}, overrides, check_files=False)
    assert config.actor_rollout_ref.rollout.name == "my_engine"
    assert names.rollout_traits("my_engine").reports == ("full",)
    assert not names.rollout_traits("my_engine").third_party
    read_user_declarations([module(ENGINE.format(name="their_engine", more=", package='json'"))])
    assert names.rollout_traits("their_engine").third_party


def test_reward_managers_and_rollout_engines_declare_their_traits_in_their_files():
    assert {name for name, traits in names.REWARD_MANAGERS.items() if traits.overlong_buffer} == {"dapo"}
    assert {name for name, traits in names.ROLLOUTS.items() if traits.third_party} == {"vllm", "sglang", "trtllm"}
    assert names.ROLLOUTS["vllm"].import_path == "verl.workers.rollout.vllm_rollout.vllm_rollout:vLLMRollout"
