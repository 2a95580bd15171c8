"""`SFTConfig`: the whole configuration of supervised fine-tuning (`verl.trainer.main_sft`)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema import key
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(SupervisedDataConfig):
    prompt_key: str = key("Column of the prompt, a text or messages; dots look inside: extra_info.question.")
    response_key: str = key("Column of the answer to learn, a text; dots look inside.")
    messages_key: str = key("Column of whole conversations; where a file has it, it is used instead of the two.")
    multiturn: bool = key("Learn everything the assistant says in a conversation, not only its last answer.")


@dataclass(kw_only=True, slots=True)
class SFTConfig(SupervisedConfig):
    data: SFTDataConfig = key("Rows and batches.")
