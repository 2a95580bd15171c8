"""RewardModelWorker: scores whole responses with a sequence classifier, in its own tokenizer if that differs."""

from __future__ import annotations

from typing import Any

from verl.algos.masked_ops import at_last_token
from verl.config import RewardModelConfig, as_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import hf_tokenizer
from verl.utils.dataset.chat import Messages
from verl.utils.fs import resolve_model_path
from verl.utils.model import compute_position_id_with_mask
from verl.utils.scoring_tokens import ScoringEncoder
from verl.workers.engine.base import MicroBatching
from verl.workers.roles.training import explain_out_of_memory, infer_columns, start_engine


class RewardModelWorker(Worker):
    """One rank of the reward model."""

    def __init__(self, config: Any) -> None:
        self.config = as_config(RewardModelConfig, config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, model_path: str | None = None) -> None:
        """Load the classifier at `model_path` (default: `reward_model.path`), and both tokenizers if they differ."""
        config, model_path = self.config, model_path or self.config.path
        if model_path is None:
            raise ValueError("reward_model.path: not set. Use the folder or hub name of a sequence classifier.")
        self.init_process_group()
        path = resolve_model_path(model_path, "reward_model.path")
        self.engine = start_engine(self, "reward_model", path, "sequence_classification", config.model, config)
        self._texts: RewardTexts | None = None
        if config.model.input_tokenizer is not None:
            own = hf_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
            other = hf_tokenizer(resolve_model_path(config.model.input_tokenizer, "reward_model.model.input_tokenizer"))
            if not _same_tokenizer(other, own):
                self._texts = RewardTexts(own, other, config.max_length)
        self.engine.offload()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reward_model"))
    @explain_out_of_memory("reward", config_root="reward_model")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return `rm_scores` [batch, response]: the score of each response at its last token.

        A model with a different tokenizer or chat template scores the prompt's messages (`raw_prompt`) with the
        response, or the conversation of an agent (`agent_messages`).
        """
        config = self.config
        texts = data if self._texts is None else self._texts.encode(data)
        micro = MicroBatching.from_config(
            config.use_dynamic_bsz, config.micro_batch_size_per_gpu, config.forward_max_token_len_per_gpu
        )
        with self.engine.on_device(optimizer=False):
            result = infer_columns(self.engine, texts, {"scores": "rm_scores"}, 1.0, micro)
        if self.engine.collects:
            result.batch["rm_scores"] = at_last_token(result.batch["rm_scores"], data.batch["response_mask"])
        return result


def _same_tokenizer(a: Any, b: Any) -> bool:
    return a.get_vocab() == b.get_vocab() and getattr(a, "chat_template", None) == getattr(b, "chat_template", None)


MESSAGES, AGENT_MESSAGES = "raw_prompt", "agent_messages"


class RewardTexts:
    """Encodes conversations with `own`, the tokenizer of a reward model, in at most `longest` tokens.

    `other` is the tokenizer of the responses. The conversation of an agent's row is `agent_messages`; that of any other
    row is the prompt's messages with the response as assistant message.
    """

    def __init__(self, own: Any, other: Any, longest: int | None) -> None:
        self._own, self._other = own, other
        self._tokens = ScoringEncoder(own, longest)

    def encode(self, data: DataProto) -> DataProto:
        """Return `input_ids`, `attention_mask`, `position_ids` of the rows' conversations, right-padded."""
        try:
            ids = self._tokens.encode(self._conversations(data))
        except ValueError as error:
            raise ValueError(
                f"reward_model.path: {error}. Change the prompts, or the chat_template in its folder."
            ) from error
        padded = self._own.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
        mask = padded["attention_mask"]
        columns = {"input_ids": padded["input_ids"], "attention_mask": mask}
        return DataProto.from_dict({**columns, "position_ids": compute_position_id_with_mask(mask)})

    def _conversations(self, data: DataProto) -> list[Messages]:
        agent_messages: list[Any] = [None] * len(data)
        if AGENT_MESSAGES in data.non_tensor_batch:
            agent_messages = list(data.non_tensor_batch[AGENT_MESSAGES])
        if all(messages is not None for messages in agent_messages):
            return agent_messages
        pairs = zip(self._prompts(data), self._responses(data), strict=True)
        single_turns = [[*messages, {"role": "assistant", "content": response}] for messages, response in pairs]
        rows = zip(agent_messages, single_turns, strict=True)
        return [single_turn if messages is None else messages for messages, single_turn in rows]

    def _prompts(self, data: DataProto) -> list[Messages]:
        if MESSAGES not in data.non_tensor_batch:
            raise ValueError(
                f"reward_model: its tokenizer or chat template differs from the policy's, and the batch has no column"
                f" {MESSAGES!r} to encode prompts from. Add the messages as {MESSAGES!r} in your dataset"
                f" (data.custom_cls), or copy the policy's tokenizer and template into the reward model's folder."
            )
        return list(data.non_tensor_batch[MESSAGES])

    def _responses(self, data: DataProto) -> list[str]:
        responses = data.batch["responses"]
        real = data.batch["attention_mask"][:, -responses.shape[1] :].bool()
        ids = [row[present].tolist() for row, present in zip(responses, real, strict=True)]
        return self._other.batch_decode(ids, skip_special_tokens=True)
