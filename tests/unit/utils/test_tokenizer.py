"""hf_tokenizer and hf_processor on real, tiny tokenizers built here."""

import json
import logging

import pytest

from verl.utils import hf_processor, hf_tokenizer
from verl.utils.tokenizer import tokenizer_if_any


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(**special: str) -> str:
        core = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "<pad>": 2, "a": 3, "b": 4}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        folder = tmp_path_factory.mktemp("tokenizer")
        PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special).save_pretrained(folder)
        return str(folder)

    return make


def test_missing_padding_token_becomes_the_end_token_and_is_said(make_tokenizer, caplog):
    with caplog.at_level(logging.INFO, logger="verl"):
        tokenizer = hf_tokenizer(make_tokenizer(eos_token="<eos>"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert "using the end token '<eos>'" in caplog.text
    assert tokenizer(["a b", "a"], padding=True)["input_ids"] == [[3, 4], [3, 1]]


def test_an_existing_padding_token_is_kept(make_tokenizer):
    assert hf_tokenizer(make_tokenizer(eos_token="<eos>", pad_token="<pad>")).pad_token_id == 2


def test_neither_padding_nor_end_token_is_an_error_with_the_remedy(make_tokenizer):
    folder = make_tokenizer()
    with pytest.raises(ValueError, match=r"pad_token"):
        hf_tokenizer(folder)
    assert hf_tokenizer(folder, pad_token="<pad>").pad_token_id == 2


def test_a_folder_without_a_tokenizer_is_an_error_and_no_tokenizer_without_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 1000}')
    with pytest.raises(ValueError, match=r"tokenizer\.json") as error:
        hf_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert tokenizer_if_any(tmp_path) is None


def test_home_is_expanded(make_tokenizer, monkeypatch):
    folder = make_tokenizer(eos_token="<eos>")
    parent, _, name = folder.rpartition("/")
    monkeypatch.setenv("HOME", parent)
    assert hf_tokenizer(f"~/{name}").eos_token == "<eos>"


def test_a_text_model_has_no_processor(make_tokenizer):
    assert hf_processor(make_tokenizer(eos_token="<eos>")) is None


def test_a_model_with_a_processor_gets_it(tmp_path):
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "A": 5}))
    built = Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), Wav2Vec2CTCTokenizer(str(vocabulary)))
    built.save_pretrained(tmp_path / "model")
    processor = hf_processor(tmp_path / "model")
    assert isinstance(processor, Wav2Vec2Processor)
    assert processor.tokenizer("A")["input_ids"] == [5]


def test_code_of_the_model_repository_is_not_run_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "auto_map": {}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\nclass Tok: ...\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tok", None]}, "tokenizer_class": "Tok"})
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        hf_tokenizer(tmp_path)
