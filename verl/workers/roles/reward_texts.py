"""RewardTexts: prompts and answers in the tokens of a reward model that has another tokenizer or chat template."""

from __future__ import annotations

from typing import Any

from verl.protocol import DataProto
from verl.utils.dataset.chat import Messages
from verl.utils.model import compute_position_id_with_mask

MESSAGES = "raw_prompt"
# A tokenizer that knows no limit of its model says some such number.
_NO_LIMIT = 10**9


class RewardTexts:
    """`own` is the reward model's tokenizer, `other` the one that the answers are written in.

    A conversation is the prompt's messages and the answer as what the assistant says, written by `own`'s chat template.
    Without one it is the pair (contents of the messages, a line break between them; answer), as classifiers of
    question and answer are trained. What is longer than `longest` tokens (None: what `own` says of its model) loses its
    beginning: what is scored is the answer.
    """

    def __init__(self, own: Any, other: Any, longest: int | None) -> None:
        self._own, self._other = own, other
        limit = getattr(own, "model_max_length", None) or _NO_LIMIT
        self._longest = longest or (limit if limit < _NO_LIMIT else None)

    def encode(self, data: DataProto) -> DataProto:
        """`input_ids`, `attention_mask`, `position_ids` of the rows' conversations, right-padded."""
        prompts, answers = self._messages(data), self._answers(data)
        templated = getattr(self._own, "chat_template", None)
        ids = self._conversations(prompts, answers) if templated else self._pairs(prompts, answers)
        padded = self._own.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
        mask = padded["attention_mask"]
        columns = {"input_ids": padded["input_ids"], "attention_mask": mask}
        return DataProto.from_dict({**columns, "position_ids": compute_position_id_with_mask(mask)})

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

    def _conversations(self, prompts: list[Messages], answers: list[str]) -> list[list[int]]:
        pairs = zip(prompts, answers, strict=True)
        whole = [[*messages, {"role": "assistant", "content": answer}] for messages, answer in pairs]
        # A template has already written the special tokens it wants.
        encoded = self._own(self._written(whole), add_special_tokens=False)["input_ids"]
        return [ids if self._longest is None else ids[-self._longest :] for ids in encoded]

    def _pairs(self, prompts: list[Messages], answers: list[str]) -> list[list[int]]:
        plain = ["\n".join(str(message["content"]) for message in messages) for messages in prompts]
        encoded = self._own(plain, answers)
        found = list(encoded["input_ids"])
        for row, ids in enumerate(found):
            excess = 0 if self._longest is None else len(ids) - self._longest
            if excess > 0:
                # Of the prompt first, then of the answer; special tokens (None) stay.
                owner = encoded.sequence_ids(row)
                words = [at for part in (0, 1) for at, whose in enumerate(owner) if whose == part]
                dropped = set(words[:excess])
                found[row] = [token for at, token in enumerate(ids) if at not in dropped]
        return found

    def _written(self, conversations: list[Messages]) -> list[str]:
        try:
            return self._own.apply_chat_template(conversations, tokenize=False)
        except Exception as cause:  # a template is a program of the model's: it may raise anything
            roles = sorted({", ".join(str(message.get("role")) for message in each) for each in conversations})
            raise ValueError(
                f"reward_model.path: its chat template refuses a conversation ({type(cause).__name__}: {cause}; roles:"
                f" {' | '.join(roles)}). Write prompts as it wants them, or change chat_template in its folder."
            ) from cause
