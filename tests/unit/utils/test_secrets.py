"""Secrets are masked in configurations that people read; keys that count tokens are not secrets."""

from __future__ import annotations

from verl.utils.py_functional import MASK, mask_arguments, mask_secrets


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
    names = (
        "HF_TOKEN",
        "GH_TOKEN",
        "SLACK_BOT_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "OPENAI_API_KEY",
    )
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
        "remotes": ["https://ghp_1@github.com/a/b", "redis://:p4ss@host:6379/0", "https://user:p@4@ss@host/a@b"],
    }
    assert mask_secrets(config) == {
        "default_hdfs_dir": f"s3://{MASK}@bucket/path",
        "urls": [f"https://host:8000/v1?model=m&api_key={MASK}#top", "http://127.0.0.1:30000"],
        "template": "mail me: a:b@c",
        "remotes": [f"https://{MASK}@github.com/a/b", f"redis://{MASK}@host:6379/0", f"https://{MASK}@host/a@b"],
    }


def test_other_keys_and_unset_secrets_keep_their_values():
    config = {"pad_token": "<pad>", "max_token_len": 8, "keys": ["a"], "api_key": None, "alert_url": None, "secrets": 1}
    assert mask_secrets(config) == config


def test_secrets_of_a_command_are_masked():
    arguments = ["verl", "train", "a.reward.api_key=sk-1", "--api-key=sk-2", "data.max_length=8", "url=s3://u:p@b/c=1"]
    masked = [f"a.reward.api_key={MASK}", f"--api-key={MASK}", "data.max_length=8", f"url=s3://{MASK}@b/c=1"]
    assert mask_arguments(arguments) == ["verl", "train", *masked]
