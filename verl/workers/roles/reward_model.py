"""RewardModelWorker: scores whole answers with a sequence classifier, in its own tokenizer where that differs."""

from __future__ import annotations

from typing import Any

import torch

from verl.config import RewardModelConfig, as_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import hf_tokenizer
from verl.utils.fs import resolve_model_path
from verl.utils.model import compute_position_id_with_mask
from verl.workers.roles.engines import make_engine
from verl.workers.roles.memory import phase_memory
from verl.workers.roles.updates import micro_batching


class RewardModelWorker(Worker):
    """One rank of the reward model."""

    def __init__(self, config: Any) -> None:
        self.config = as_config(RewardModelConfig, config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the classifier, its tokenizer and, if the texts arrive in another one, that."""
        config = self.config
        if config.path is None:
            raise ValueError("reward_model.path: not set. Give the folder or hub name of a sequence classifier.")
        self.init_process_group()
        path = resolve_model_path(config.path)
        self.engine = make_engine(config.strategy, path, "sequence_classification", config.model, config, self.device)
        self.tokenizer = hf_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        self.input_tokenizer = None
        if config.model.input_tokenizer is not None:
            other = hf_tokenizer(resolve_model_path(config.model.input_tokenizer))
            if not _same_tokenizer(other, self.tokenizer):
                self.input_tokenizer = other
        self.register_mesh_place("reward_model", self.engine.dp_rank, collect=self.engine.answers)
        self._rest()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reward_model"))
    @phase_memory("reward", at="reward_model")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` [batch, response]: the score of each answer on its last token."""
        self.engine.to("device", model=True, optimizer=False)
        texts = self._reencoded(data) if self.input_tokenizer is not None else data
        micro = micro_batching(self.config, "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu")
        scores = self.engine.infer(texts, ["scores"], 1.0, micro).batch["scores"]
        self._rest()
        return DataProto.from_dict({"rm_scores": on_last_token(scores, data.batch["response_mask"])})

    def _rest(self) -> None:
        """Between phases, if the configuration says so, the weights wait in host memory."""
        if self.config.fsdp_config.param_offload:
            self.engine.to("cpu", model=True, optimizer=False)

    def _reencoded(self, data: DataProto) -> DataProto:
        """The conversations in the reward model's own tokens: its chat template, or a (prompt, answer) pair."""
        prompts, answers = self._texts(data)
        if getattr(self.tokenizer, "chat_template", None):
            whole = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], tokenize=False
                )
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            encoded = self._encode(whole, add_special_tokens=False)
        else:
            encoded = self._encode(prompts, answers)
        mask = encoded["attention_mask"]
        return DataProto.from_dict(
            {
                "input_ids": encoded["input_ids"],
                "attention_mask": mask,
                "position_ids": compute_position_id_with_mask(mask),
            }
        )

    def _texts(self, data: DataProto) -> tuple[list[str], list[str]]:
        assert self.input_tokenizer is not None
        width = data.batch["responses"].shape[1]
        real = data.batch["attention_mask"].bool()
        ids = data.batch["input_ids"]
        rows = range(len(data))
        prompts = [ids[i, :-width][real[i, :-width]].tolist() for i in rows]
        answers = [ids[i, -width:][real[i, -width:]].tolist() for i in rows]
        decode = self.input_tokenizer.batch_decode
        return decode(prompts, skip_special_tokens=True), decode(answers, skip_special_tokens=True)

    def _encode(self, *texts: list[str], **options: Any) -> Any:
        longest = self.config.max_length
        return self.tokenizer(
            *texts,
            padding=True,
            padding_side="right",
            truncation=longest is not None,
            max_length=longest,
            return_tensors="pt",
            **options,
        )


def on_last_token(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """[batch] → [batch, response]: each score on the last position with mask 1; rows without one get none."""
    placed = torch.zeros(response_mask.shape, dtype=torch.float32)
    positions = torch.arange(response_mask.shape[1]).expand_as(response_mask)
    last = torch.where(response_mask.bool(), positions, -1).max(dim=1).values
    rows = torch.nonzero(last >= 0).flatten()
    placed[rows, last[rows]] = scores.float()[rows]
    return placed


def _same_tokenizer(a: Any, b: Any) -> bool:
    return a.get_vocab() == b.get_vocab() and getattr(a, "chat_template", None) == getattr(b, "chat_template", None)
