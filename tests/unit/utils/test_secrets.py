"""Secrets are masked in configurations that people read; keys that count tokens are not secrets."""

from __future__ import annotations

from verl.utils.py_functional import MASK, mask_secrets


def test_values_of_secret_keys_are_masked_at_any_depth():
    config = {
        "custom_reward_function": {"reward_kwargs": {"judge_api_key": "sk-1", "apiKey": "sk-2", "model": "m"}},
        "trainer": {"record": {"alert_url": "https://host/secret"}, "logger": ["console"]},
        "servers": [{"password": "p", "access_token": "t", "port": 1}],
    }
    assert mask_secrets(config) == {
        "custom_reward_function": {"reward_kwargs": {"judge_api_key": MASK, "apiKey": MASK, "model": "m"}},
        "trainer": {"record": {"alert_url": MASK}, "logger": ["console"]},
        "servers": [{"password": MASK, "access_token": MASK, "port": 1}],
    }


def test_other_keys_and_unset_secrets_keep_their_values():
    config = {"pad_token": "<pad>", "max_token_len": 8, "keys": ["a"], "api_key": None, "alert_url": None, "secrets": 1}
    assert mask_secrets(config) == config
