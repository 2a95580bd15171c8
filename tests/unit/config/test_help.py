"""Help of programs: ten keys each, blocks by short names, descriptions from the declarations."""

from __future__ import annotations

import pytest

from verl.config.help import PROGRAMS, find_program, help_text, requested_help
from verl.config.load import ROOTS
from verl.config.schema import walk

PPO = find_program("ppo_trainer")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.root.yaml)
def test_ten_keys_with_default_and_description(program):
    declared = dict(walk(program.root.cls))
    text = help_text(program, [], "verl x")
    assert len(program.keys) == len(set(program.keys)) == 10
    for key in program.keys:
        assert f"  {key} = " in text
        assert declared[key].key.doc.split()[0] in text
    assert all(f"  {name}" in text for name in declared if "." not in name)
    assert len(text.splitlines()) < 70


def test_every_program_has_help():
    assert {program.root for program in PROGRAMS} == set(ROOTS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.root.yaml)
def test_every_block_and_key_can_be_explained(program):
    for path, entry in walk(program.root.cls):
        assert entry.key.doc.split()[0] in help_text(program, [path], "verl x")


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("data", ["data: "]),
        ("actor.optim", ["actor_rollout_ref.actor.optim: "]),
        ("rollout", ["actor_rollout_ref.rollout: "]),
        ("lr", ["actor_rollout_ref.actor.optim.lr = 1e-06", "critic.optim.lr = 1e-05"]),
        ("clip_ratio_c", ["actor_rollout_ref.actor.clip_ratio_c = 3"]),
        ("actor_rollout_ref.actor.max_grad_norm", ["actor_rollout_ref.actor.grad_clip = 1"]),
    ],
)
def test_short_names_and_aliases(name, paths):
    text = help_text(PPO, [name], "verl train")
    for path in paths:
        assert path in text


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("dta", r"\bdata\?"),
        ("optim", r"\.actor\.optim, critic\.optim"),
        ("actor.optm", r"\.actor\.optim or critic\.optim\?"),
    ],
)
def test_unknown_and_ambiguous_names_are_errors(name, named):
    with pytest.raises(ValueError, match=f"^{name}: .*{named}"):
        help_text(PPO, [name], "verl train")


@pytest.mark.parametrize(
    ("arguments", "blocks"),
    [
        (["a.b=1"], None),
        (["--help"], []),
        (["-h"], []),
        (["a.b=1", "--help", "data", "--cfg"], ["data"]),
        (["--help=data"], ["data"]),
    ],
)
def test_blocks_after_the_option(arguments, blocks):
    assert requested_help(arguments) == blocks
