"""Which token ids end an answer: every source counts, and nothing that is no token of the model does."""

from __future__ import annotations

import logging

import pytest

from tests.support.tiny import save_tiny_model, tiny_config, tiny_tokenizer
from verl.utils.end_tokens import find_end_tokens

MARK = "<|{{ m['role'] }}|>"
CHATML = "{% for m in messages %}" + MARK + "\n{{ m['content'] }}<|eot|>\n{% endfor %}"
# What chat templates of the field write after an answer, in their shapes.
TEMPLATES = {
    "line break after it": (CHATML, "<|eot|>"),
    "a space before it, the text trimmed": (
        CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }} "),
        "<|eot|>",
    ),
    "two in a row: the first": (CHATML.replace("<|eot|>\n", "<|eot|>\n<|end|>"), "<|eot|>"),
    "one that begins another: the longer": (CHATML.replace("<|eot|>", "<|eot|><|eot|>"), "<|eot|><|eot|>"),
    "an added token that is not special": (CHATML.replace("<|eot|>", "</turn>"), "</turn>"),
    "eos by name": (CHATML.replace("<|eot|>", "{{ eos_token }}"), "<|end|>"),
    "plain text": (CHATML.replace("<|eot|>", "\n\nUser:"), None),
    "the next role token": ("{% for m in messages %}" + MARK + "{{ m['content'] }}{% endfor %}", "<|user|>"),
    "nothing": ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}", None),
    "no answer written": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
        None,
    ),
}


@pytest.fixture
def tokenizer():
    from tokenizers import AddedToken

    made = tiny_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|eot|>", "<|eot|><|eot|>"]})
    made.add_tokens([AddedToken("</turn>", special=False)])
    return made


@pytest.mark.parametrize(("template", "token"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_the_chat_template_names_what_it_writes_after_an_answer(tokenizer, tmp_path, template, token):
    tokenizer.chat_template = template
    found = find_end_tokens(str(tmp_path), tiny_config(vocab_size=300, eos_token_id=None), tokenizer)
    named = [number for number, sources in found.named_by.items() if "chat template" in sources]
    assert named == ([] if token is None else [tokenizer.convert_tokens_to_ids(token)])


def test_every_source_counts_and_is_named(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    end, turn = tokenizer.convert_tokens_to_ids(["<|eot|>", "</turn>"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    config = tiny_config(vocab_size=300, eos_token_id=[8, 9])
    found = find_end_tokens(str(tmp_path), config, tokenizer, stop_token_ids=[turn, 7])
    assert found.named_by == {
        7: ("generation config", "stop_token_ids"),
        8: ("generation config", "model config"),
        9: ("model config",),
        1: ("tokenizer",),
        end: ("chat template",),
        turn: ("stop_token_ids",),
    }
    told = found.describe(tokenizer)
    assert "<|end|> = 1 (tokenizer)" in told
    assert told.endswith("Each of them ends a response.")
    assert "rollout.ignore_eos = True: only those of stop_token_ids" in found.describe(tokenizer, ignore_eos=True)


def test_template_arguments_of_the_run_decide_which_template_it_is(tokenizer, tmp_path):
    kwargs = {"chat_template": CHATML}
    found = find_end_tokens(str(tmp_path), tiny_config(vocab_size=300), tokenizer, kwargs)
    assert tokenizer.convert_tokens_to_ids("<|eot|>") in found.ids


def test_ids_outside_of_the_vocabulary_end_nothing_and_are_refused_where_the_user_gives_them(tmp_path):
    config = tiny_config(vocab_size=264, eos_token_id=[-1, 1, 264])
    assert find_end_tokens(str(tmp_path), config).ids == {1}
    with pytest.raises(ValueError, match=r"rollout\.stop_token_ids"):
        find_end_tokens(str(tmp_path), config, stop_token_ids=[264])


def test_a_template_that_raises_names_nothing_and_is_said(tokenizer, tmp_path, caplog):
    tokenizer.chat_template = "{{ raise_exception('system first') }}"
    with caplog.at_level(logging.WARNING):
        assert find_end_tokens(str(tmp_path), tiny_config(), tokenizer).ids == {1}
    assert "system first" in caplog.text
    assert "rollout.stop_token_ids" in caplog.text


def test_a_model_without_any_says_so(tmp_path):
    tokenizer = tiny_tokenizer()
    found = find_end_tokens(str(tmp_path), tiny_config(eos_token_id=None))
    assert found.ids == frozenset()
    assert "no token ends a response" in found.describe(tokenizer)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_engines_take_all_sources_of_the_folder(tmp_path, name):
    from verl.config import ModelConfig, RolloutConfig, as_config
    from verl.workers.rollout import get_rollout_class

    folder = save_tiny_model(tmp_path, eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    model = as_config(ModelConfig, {"path": str(folder)}, at="actor_rollout_ref.model")
    rollout = as_config(RolloutConfig, {"name": name, "max_model_len": 64, "load_format": "dummy"})
    with get_rollout_class(name)(str(folder), model, rollout, "cpu") as engine:
        assert engine.eos_token_ids == {1, 5, 6, 7}
