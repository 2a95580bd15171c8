"""GenerationConfig and EvalConfig load as strictly as the others: one default per key, all problems at once."""

import pytest

from tests.support.doc_scripts import load_script
from verl.config import ConfigError, EvalConfig, GenerationConfig, RolloutConfig, as_config, load_config
from verl.config.compose import default_tree, groups
from verl.config.schema import alias_table, entries, get_path, walk

GIVEN = ("data.path=openai/gsm8k", "data.output_path=out.parquet", "model.path=a/b", "trainer.device=cpu")


def load(*overrides):
    return load_config(None, [*GIVEN, *overrides], check_files=False, root=GenerationConfig)


@pytest.mark.parametrize(("cls", "name"), [(GenerationConfig, "generation"), (EvalConfig, "evaluation")])
def test_yaml_holds_a_default_for_exactly_the_declared_keys(cls, name):
    tree = default_tree(root=name)
    for path, entry in walk(cls):
        assert entry.key.doc.endswith("."), path
        assert len(entry.key.doc) < 120, path
        if entry.block is not None:
            assert set(get_path(tree, path)) == set(entries(entry.block)), path
    assert set(tree) == set(entries(cls))
    assert groups(name) == {}
    assert not set(alias_table(cls)) & {path for path, _ in walk(cls)}


def test_page_has_every_block():
    page = load_script("config_page.py").render()
    for cls, heading in ((GenerationConfig, "Generation: "), (EvalConfig, "Evaluation: ")):
        for path, entry in walk(cls):
            assert entry.block is None or f" {heading}{path}\n" in page


def test_nulls_are_resolved_and_other_spellings_accepted():
    config = load("rollout.n=4", "rollout.prompt_length=100", "rollout.response_length=20")
    assert (config.data.n_samples, config.data.max_prompt_length, config.rollout.max_new_tokens) == (4, 100, 20)
    assert (config.rollout.max_model_len, config.rollout.dtype) == (120, "float32")
    assert load_config(config.to_dict(), check_files=False, root=GenerationConfig) == config


def test_a_training_has_every_key_of_generation():
    settings = load().rollout.to_dict()
    rollout = as_config(RolloutConfig, settings)
    assert {name: rollout[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size"),
        ("rollout.max_model_len=1024", "rollout.max_model_len"),
        ("rollout.temperature=-1", "rollout.temperature"),
        ("data.output_path=out.json", "data.output_path"),
        ("data.path=null", "data.path"),
        ("rollout.val_kwargs.n=1", "rollout.val_kwargs.n"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(override, key):
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_what_may_surprise_is_said():
    config = load("data.n_samples=2", "rollout.temperature=0", "rollout.max_model_len=1100")
    assert [notice.partition(" =")[0] for notice in config.notices] == ["rollout.max_model_len", "data.n_samples"]
