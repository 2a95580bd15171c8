"""Which token a reward model is padded with: one that does not end a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from verl.utils.end_tokens import find_end_tokens

logger = logging.getLogger(__name__)


def padding_token(tokenizer: Any, vocab_size: int, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """The tokenizer's own, or another that no answer ends with; one of the model's `vocab_size` tokens.

    transformers reads a classifier's score at the last token that is not padding: of a text whose end token is also
    the padding, it would read the one before. It also keeps the padding's embedding from learning, so that a token
    which the chat template does not write is the better choice.
    """
    special = tokenizer.added_tokens_decoder
    named = [tokenizer.pad_token_id, tokenizer.unk_token_id, *(at for at, token in special.items() if token.special)]
    known = [at for at in dict.fromkeys(named) if at is not None and at < vocab_size]
    ends = find_end_tokens(None, None, tokenizer, template_kwargs).ids
    free = [at for at in known if at not in ends]
    if not free:
        return _end_token(tokenizer, vocab_size)
    template = str((template_kwargs or {}).get("chat_template") or tokenizer.chat_template or "")
    tokens = tokenizer.convert_ids_to_tokens(free)
    written = [at == tokenizer.bos_token_id or token in template for at, token in zip(free, tokens, strict=True)]
    token = tokens[written.index(False)] if False in written else tokens[0]
    if token != tokenizer.pad_token:
        logger.info(
            "padding token: %r instead of %r, which ends answers or is not the model's", token, tokenizer.pad_token
        )
    return token


def _end_token(tokenizer: Any, vocab_size: int) -> str:
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= vocab_size:
        raise ValueError(
            f"model.path: the model has {vocab_size} tokens (vocab_size), and its tokenizer's padding and end tokens"
            f" ({tokenizer.pad_token!r} = {tokenizer.pad_token_id}, {tokenizer.eos_token!r} = {tokenizer.eos_token_id})"
            " are none of them. Resize the model's embeddings to its tokenizer, or take the tokenizer it was made with."
        )
    logger.warning(
        "the tokenizer has no special token of the model's but its end token %r, so that is the padding too: "
        "transformers reads scores one token too early; here they are read at the end",
        tokenizer.eos_token,
    )
    return tokenizer.eos_token
