"""Keys of the search agent: what `do_search` turns on, how lengths are read, what is refused."""

from __future__ import annotations

import pytest

from verl.config import ConfigError, load_config

ROLLOUT = "actor_rollout_ref.rollout"
RUN = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=org/model", "algorithm=grpo"]


def load(*overrides: str):
    return load_config(None, [*RUN, *overrides], check_files=False)


def test_searching_turns_asynchronous_generation_on_and_says_so():
    config = load("do_search=True")
    assert config.actor_rollout_ref.rollout.mode == "async"
    assert any("mode is set to async" in notice for notice in config.notices)
    assert not any(
        "mode is set to async" in notice for notice in load("do_search=True", f"{ROLLOUT}.mode=async").notices
    )
    assert load().actor_rollout_ref.rollout.mode == "sync"


def test_group_size_has_two_spellings_that_may_not_differ():
    assert load(f"{ROLLOUT}.n_agent=5").actor_rollout_ref.rollout.n == 5
    with pytest.raises(ConfigError, match=r"n_agent.*n = 4"):
        load(f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n=4")


def test_lengths_of_a_search_r1_script_are_read_as_written_there():
    script = ["do_search=True", "data.max_prompt_length=4096", "data.max_response_length=500"]
    config = load(*script, "data.max_start_length=2048", "data.max_obs_length=400")
    rollout = config.actor_rollout_ref.rollout
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 2548)
    assert (config.data.max_turn_length, rollout.max_new_tokens, rollout.max_model_len) == (500, 2548, 4596)
    assert any("data.max_start_length = 2048" in notice for notice in config.notices)
    again = load_config(config.to_dict(), check_files=False)
    assert again.data == config.data
    assert again.actor_rollout_ref == config.actor_rollout_ref
    plain = load(*script, "data.max_obs_length=400")
    assert (plain.data.max_prompt_length, plain.data.max_response_length) == (4096, 500)


def test_a_corpus_of_ones_own_needs_no_service():
    assert load("do_search=True", "retriever.corpus_path=/c.jsonl").retriever.url is None
    assert load("do_search=True").retriever.url == "http://127.0.0.1:8000/retrieve"
    with pytest.raises(ConfigError, match=r"retriever\.corpus_path = /c\.jsonl: retriever\.url = http"):
        load("do_search=True", "retriever.corpus_path=/c.jsonl", "retriever.url=http://10.0.0.1:8000/retrieve")
    with pytest.raises(ConfigError, match=r"retriever\.url = null"):
        load("do_search=True", "retriever.url=null")


@pytest.mark.parametrize("value", ["True", "False"])
def test_state_masking_is_always_on_and_the_key_is_said_to_be_idle(value):
    notices = load(f"+actor_rollout_ref.actor.state_masking={value}").notices
    assert any(notice.startswith("actor_rollout_ref.actor.state_masking is not needed") for notice in notices)


def test_information_that_leaves_no_room_for_an_answer_is_refused():
    with pytest.raises(ConfigError, match=r"data\.max_obs_length = 500: .*data\.max_response_length = 400"):
        load("do_search=True", "data.max_response_length=400")
