"""RewardTexts: prompts and answers in the tokens of a reward model that has another tokenizer or chat template."""

from __future__ import annotations

from typing import Any

from verl.protocol import DataProto
from verl.utils.conversation_tokens import ConversationTokens
from verl.utils.dataset.chat import Messages
from verl.utils.model import compute_position_id_with_mask

MESSAGES, AGENT_MESSAGES = "raw_prompt", "agent_messages"


class RewardTexts:
    """`own` is the reward model's tokenizer, `other` the one that the answers are written in.

    The conversation of an agent's row is `agent_messages`. That of any other row is the prompt's messages followed by
    the answer as an assistant message. `ConversationTokens` encodes it in at most `longest` tokens.
    """

    def __init__(self, own: Any, other: Any, longest: int | None) -> None:
        self._own, self._other = own, other
        self._tokens = ConversationTokens(own, longest)

    def encode(self, data: DataProto) -> DataProto:
        """`input_ids`, `attention_mask`, `position_ids` of the rows' conversations, right-padded."""
        whole = self._conversations(data)
        try:
            ids = self._tokens.encode(whole)
        except ValueError as error:
            raise ValueError(
                f"reward_model.path: {error}. Write prompts as it wants them, or change chat_template in its folder."
            ) from error
        padded = self._own.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
        mask = padded["attention_mask"]
        columns = {"input_ids": padded["input_ids"], "attention_mask": mask}
        return DataProto.from_dict({**columns, "position_ids": compute_position_id_with_mask(mask)})

    def _conversations(self, data: DataProto) -> list[Messages]:
        by_agents: list[Any] = [None] * len(data)
        if AGENT_MESSAGES in data.non_tensor_batch:
            by_agents = list(data.non_tensor_batch[AGENT_MESSAGES])
        if all(messages is not None for messages in by_agents):
            return by_agents
        pairs = zip(self._messages(data), self._answers(data), strict=True)
        plain = [[*messages, {"role": "assistant", "content": answer}] for messages, answer in pairs]
        return [other if messages is None else messages for messages, other in zip(by_agents, plain, strict=True)]

    def _messages(self, data: DataProto) -> list[Messages]:
        if MESSAGES not in data.non_tensor_batch:
            raise ValueError(
                f"reward_model: its tokenizer or chat template is not the policy's, and the batch has no {MESSAGES!r}"
                f" to write prompts anew from. Let the rows of your dataset (data.custom_cls) hold the messages as"
                f" {MESSAGES!r}, or give the reward model's folder the policy's tokenizer and template."
            )
        return list(data.non_tensor_batch[MESSAGES])

    def _answers(self, data: DataProto) -> list[str]:
        responses = data.batch["responses"]
        real = data.batch["attention_mask"][:, -responses.shape[1] :].bool()
        ids = [row[present].tolist() for row, present in zip(responses, real, strict=True)]
        return self._other.batch_decode(ids, skip_special_tokens=True)
