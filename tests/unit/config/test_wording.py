"""Probable spelling mistakes."""

import pytest

from verl.config.names import ADV_ESTIMATORS
from verl.config.problems import closest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpro", "grpo"),
        ("grp", "grpo"),
        ("GRPO", None),
        ("dpo", None),
        ("ppo", None),
        ("reinforce_plusplus", "reinforce_plus_plus"),
        ("einforce_plus_plus", "reinforce_plus_plus"),
        ("nothing_like_it", None),
    ],
)
def test_a_known_name_is_suggested_only_where_it_is_close(name, meant):
    assert closest(name, ADV_ESTIMATORS) == meant
