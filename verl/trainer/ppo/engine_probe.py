"""EngineProbe: compares log-probs that a third-party engine reports with those that training computes."""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl.config import PPOConfig, names
from verl.config.layout import ROLLOUT
from verl.protocol import DataProto, object_array
from verl.trainer.common.guard import TrainingStoppedError
from verl.trainer.ppo.groups import WorkerGroups, local_columns
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.utils.model import compute_position_id_with_mask

logger = logging.getLogger(__name__)

_TEXTS = ("The capital of France is", "1, 2, 3, 5, 8,", "def add(a, b):\n", "Once upon a time there was a")
_NEW_TOKENS = 16
# Upper bounds for the mean absolute difference of log-probs per token that rounding explains. Logits reach 20 to 30.
# Summation in another order changes them by about one rounding error: 2^-9 relative in bfloat16, 2^-12 in float16,
# 2^-24 in float32. The mean over tokens is then 0.01 to 0.03 in bfloat16, an eighth of that in float16, 1e-5 in
# float32. A wrong temperature, layer or weight changes the mean by some tenths; the bounds are in between.
_ROUNDING = {"bfloat16": 0.1, "bf16": 0.1, "float16": 0.02, "fp16": 0.02, "float32": 1e-3, "fp32": 1e-3}
_QUANTIZED = 0.3


class EngineMismatchError(TrainingStoppedError):
    """The engine's log-probs differ from the policy's by more than rounding."""


class EngineProbe:
    """Checks what weight fingerprints cannot: that the engine computes the same distribution as training, at the
    training temperature."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        rollouts: RolloutManager,
        wanted: bool | None = None,
    ) -> None:
        """`wanted`: whether to check the engine; None: only third-party engines (tests cover the others)."""
        self._config, self._tokenizer, self._groups, self._rollouts = config, tokenizer, groups, rollouts
        self._rollout = config.actor_rollout_ref.rollout
        self._wanted = names.ROLLOUTS[self._rollout.name].foreign if wanted is None else wanted
        self._proved = 0

    def __call__(self) -> None:
        """Call it after a weight sync: checks engines that were started since the last call. Raises
        EngineMismatchError, which ends the run."""
        if not self._wanted or self._proved == self._groups.engine_starts:
            return
        difference, limit = self.measure(), self.limit
        if not difference <= limit:
            raise EngineMismatchError(
                f"{ROLLOUT}.name = {self._rollout.name}: the log-probs it reports differ from training's by"
                f" {difference:.3g} per token on average, but rounding explains {limit:.3g}"
                f" ({self._precisions}, temperature {self._rollout.temperature:g}). It does not sample from the"
                " policy's distribution. Likely causes: the engine computes this model differently (positions,"
                " scaling, experts), keeps a copy of weights that the weight sync does not update, or reports log-probs"
                f" at another temperature. Try {ROLLOUT}.dtype=float32 to exclude rounding, another version of the"
                f" engine, or {ROLLOUT}.name=native."
            )
        self._proved = self._groups.engine_starts
        logger.info(
            "%s: log-probs of %s and of training differ by %.2g per token (rounding: up to %.2g).",
            *(ROLLOUT, self._rollout.name, difference, limit),
        )

    def measure(self) -> float:
        """Mean absolute difference of the two log-probs per token, over a few responses of every replica."""
        prompts = self._prompts()
        answers = self._rollouts.generate(prompts, prompts.meta_info)
        computed = self._groups.infer(self._groups.actor.compute_log_prob, answers, "actor")
        names_read = ("rollout_log_probs", "old_log_probs", "response_mask")
        columns = local_columns(answers.union(computed), names_read, ()).batch
        difference = (columns["rollout_log_probs"] - columns["old_log_probs"]).abs()
        return float(difference[columns["response_mask"].bool()].mean())

    @property
    def limit(self) -> float:
        """Largest value of `measure` that rounding explains: that of the coarser dtype, over the temperature if it is
        below 1."""
        rounding = _QUANTIZED if self._quantization else max(_ROUNDING[kind] for kind in self._kinds)
        return rounding * max(1.0, 1.0 / self._rollout.temperature)

    @property
    def _quantization(self) -> str | None:
        """Quantization of the engine; ignored for running servers, whose limit depends on `dtype` alone."""
        return None if self._rollout.server_urls else self._rollout.quantization

    @property
    def _kinds(self) -> tuple[str, str]:
        actor = self._config.actor_rollout_ref.actor
        return self._rollout.dtype, actor[names.TRAINING_ENGINES[actor.strategy].block].mixed_precision

    @property
    def _precisions(self) -> str:
        engine, trainer = self._kinds
        return f"engine {self._quantization or engine}, training {trainer}"

    def _prompts(self) -> DataProto:
        """The same prompts for every replica, sampled without truncation (top-k, top-p, min-p): every engine then
        reports the log-probs that training computes."""
        longest = self._config.data.max_prompt_length
        replicas, ranks = len(self._groups.replicas), self._groups.dp_sizes["actor"]
        copies = -(-ranks // (len(_TEXTS) * replicas))  # at least as many rows as training has ranks
        rows = [self._tokenizer.encode(text)[-longest:] for text in _TEXTS] * replicas * copies
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
        sampling = {
            "do_sample": True,
            "temperature": self._rollout.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
        }
        ending = {"max_new_tokens": min(_NEW_TOKENS, self._rollout.max_new_tokens), "ignore_eos": True, "stop": ()}
        about = {"step": 0, "seed": self._rollout.seed, "pad_token_id": self._tokenizer.pad_token_id}
        columns = {
            "uid": object_array([f"probe-{number}" for number in range(len(rows))]),
            "sample_index": object_array([0] * len(rows)),
            "agent_name": object_array([names.SINGLE_TURN] * len(rows)),
        }
        return DataProto.from_dict(tensors, columns, {**about, **sampling, **ending})
