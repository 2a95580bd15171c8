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


def test_environment_variables_with_keys_are_masked():
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "OPENAI_API_KEY")
    config = {"ray_init": {"env_vars": {**dict.fromkeys(names, "x"), "TOKENIZERS_PARALLELISM": "false"}}}
    assert mask_secrets(config)["ray_init"]["env_vars"] == {
        **dict.fromkeys(names, MASK),
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_passwords_and_keys_in_urls_are_masked():
    config = {
        "default_hdfs_dir": "s3://user:p4ss@bucket/path",
        "urls": ["https://host:8000/v1?model=m&api_key=abc#top", "http://127.0.0.1:30000"],
        "template": "mail me: a:b@c",
    }
    assert mask_secrets(config) == {
        "default_hdfs_dir": f"s3://{MASK}@bucket/path",
        "urls": [f"https://host:8000/v1?model=m&api_key={MASK}#top", "http://127.0.0.1:30000"],
        "template": "mail me: a:b@c",
    }


def test_other_keys_and_unset_secrets_keep_their_values():
    config = {"pad_token": "<pad>", "max_token_len": 8, "keys": ["a"], "api_key": None, "alert_url": None, "secrets": 1}
    assert mask_secrets(config) == config
