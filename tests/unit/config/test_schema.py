"""Declarations and YAML files belong together: each key once here, its default once there."""

import functools
import pickle
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl.config import PPOConfig, load_config
from verl.config.compose import CONFIG_DIR, default_tree, groups
from verl.config.schema import Block, alias_table, entries, walk

GIVEN = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=2")


@functools.cache
def declared_keys():
    return dict(walk(PPOConfig))


def leaves(values, prefix=""):
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else name
        entry = declared_keys().get(path)
        if isinstance(value, dict) and (entry is None or entry.block is not None):
            yield from leaves(value, path)
        else:
            yield path


def test_yaml_holds_a_default_for_exactly_the_declared_keys():
    declared = {path for path, entry in walk(PPOConfig) if entry.block is None}
    assert set(leaves(default_tree())) == declared


@pytest.mark.parametrize("group", groups())
def test_every_option_of_a_group_has_the_same_keys(group):
    shapes = {option: set(leaves(default_tree({group: option}))) for option in groups()[group]}
    assert len({frozenset(shape) for shape in shapes.values()}) == 1


def test_the_files_are_those_users_know():
    files = {str(path.relative_to(CONFIG_DIR)) for path in CONFIG_DIR.rglob("*.yaml")}
    assert files >= {
        "ppo_trainer.yaml",
        "ppo_megatron_trainer.yaml",
        "algorithm/ppo.yaml",
        "algorithm/grpo.yaml",
        "actor_rollout_ref/fsdp.yaml",
        "actor_rollout_ref/megatron.yaml",
        "critic/fsdp.yaml",
        "critic/megatron.yaml",
        "data/rlhf.yaml",
    }


def test_every_key_says_what_it_means_in_one_sentence():
    for path, entry in walk(PPOConfig):
        assert entry.key.doc.endswith("."), path
        assert len(entry.key.doc) < 120, path


def test_other_spellings_lead_to_keys_and_are_not_keys_themselves():
    declared = dict(walk(PPOConfig))
    for alias, canonical in alias_table(PPOConfig).items():
        assert canonical in declared
        assert alias not in declared


def test_after_loading_only_optional_keys_are_null():
    config = load_config(overrides=GIVEN, check_files=False)

    def check(block: Block) -> None:
        for name, entry in entries(type(block)).items():
            if isinstance(block[name], Block):
                check(block[name])
            else:
                assert block[name] is not None or entry.optional, name

    check(config)


def test_blocks_read_like_mappings_and_attributes():
    actor = load_config(overrides=GIVEN, check_files=False).actor_rollout_ref.actor
    assert actor.clip_ratio == actor["clip_ratio"] == actor.get("clip_ratio") == dict(actor)["clip_ratio"] == 0.2
    assert actor.max_grad_norm == actor["max_grad_norm"] == actor.grad_clip
    assert "clip_ratio" in actor
    assert "nonsense" not in actor
    assert actor.get("nonsense", 7) == 7
    assert list(actor) == list(actor.keys()) == [name for name, _ in actor.items()]
    with pytest.raises(KeyError):
        actor["nonsense"]
    with pytest.raises(AttributeError, match=r"'clip_ratio'"):
        _ = actor.clip_ration
    with pytest.raises(AttributeError):
        actor.clip_ration = 0.1


def test_pickles_and_reloads_equal():
    config = load_config(overrides=GIVEN, check_files=False)
    assert pickle.loads(pickle.dumps(config)) == config
    assert load_config(config.to_dict(), check_files=False) == config
    assert load_config(OmegaConf.create(config.to_dict()), check_files=False) == config
    assert load_config(config) is config


def test_importing_the_configuration_and_the_entry_imports_neither_torch_nor_ray():
    code = (
        "import sys, verl.config, verl.trainer.main_ppo, verl.trainer.constants_ppo\n"
        "heavy = {'torch', 'ray', 'transformers', 'datasets', 'numpy', 'tensordict'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_verl_config_itself_needs_no_hydra():
    code = "import sys, verl.config; sys.exit('hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
