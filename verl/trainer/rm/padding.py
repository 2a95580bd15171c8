"""Which token a reward model is padded with: one that does not end a text."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def padding_token(tokenizer: Any) -> str:
    """The tokenizer's own, or another that no answer ends with.

    transformers reads a classifier's score at the last token that is not padding: of a text whose end token is also
    the padding, it would read the one before.
    """
    special = tokenizer.added_tokens_decoder
    named = [tokenizer.pad_token_id, tokenizer.unk_token_id, *(at for at, token in special.items() if token.special)]
    free = [at for at in named if at is not None and at != tokenizer.eos_token_id]
    if not free:
        logger.warning(
            "the tokenizer has no special token but its end token %r, so that is the padding too: transformers reads "
            "scores one token too early; here they are read at the end",
            tokenizer.eos_token,
        )
        return tokenizer.pad_token
    token = tokenizer.convert_ids_to_tokens(free[0])
    if free[0] != tokenizer.pad_token_id:
        logger.info("padding token: %r instead of %r, which ends every answer", token, tokenizer.pad_token)
    return token
