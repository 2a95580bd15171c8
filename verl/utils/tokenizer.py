"""Tokenizer and processor of a model, ready for padding, without executing code of the model repository."""

from __future__ import annotations

import logging
import os
from typing import Any

from verl.utils.fs import expand_path

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def hf_tokenizer(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return the model's tokenizer; a missing padding token is set to the end token.

    `trust_remote_code` defaults to False: True runs Python code from the model's repository.
    """
    from transformers import AutoTokenizer

    kwargs.setdefault("trust_remote_code", False)
    tokenizer = AutoTokenizer.from_pretrained(expand_path(name_or_path), **kwargs)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"{os.fspath(name_or_path)}: the tokenizer has neither a padding nor an end token. "
                "Pass pad_token='…' or add one to its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("%s: no padding token; using the end token %r", name_or_path, tokenizer.eos_token)
    return tokenizer


def tokenizer_if_any(name_or_path: str | os.PathLike[str], trust_remote_code: bool = False) -> Any | None:
    """Return the tokenizer unchanged, or None for a local folder without one."""
    from transformers import AutoTokenizer

    path = expand_path(name_or_path)
    if os.path.isdir(path) and not any(os.path.isfile(os.path.join(path, name)) for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def hf_processor(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any | None:
    """Return the model's processor (text with images, audio or video), or None if it has none."""
    path = expand_path(name_or_path)
    if not any(_has_file(path, name) for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    kwargs.setdefault("trust_remote_code", False)
    processor = AutoProcessor.from_pretrained(path, **kwargs)
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _has_file(path: str, name: str) -> bool:
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, name))
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        hf_hub_download(path, name)
    except EntryNotFoundError:  # not in the repository; offline: not in the local cache
        return False
    return True
