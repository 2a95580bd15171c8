"""EngineProbe: an engine of other make answers a few prompts, and training must find the same log-probs in them."""

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
# Mean |difference| in a token's log-prob that rounding explains. Logits of models in use reach 20 to 30, and two
# orders of the same sums part by about a rounding of that: 2^-9 of it in bfloat16, 2^-12 in float16, 2^-24 in float32.
# Averaged over tokens that is 0.01 to 0.03, an eighth of it, and 1e-5. A wrong temperature, layer or weight moves the
# mean by some tenths: the bounds lie between.
_ROUNDING = {"bfloat16": 0.1, "bf16": 0.1, "float16": 0.02, "fp16": 0.02, "float32": 1e-3, "fp32": 1e-3}
_QUANTIZED = 0.3


class EngineMismatchError(TrainingStoppedError):
    """What the engine says of its tokens is not what the policy says of them."""


class EngineProbe:
    """Proves what no fingerprint can: that the weights are used as training uses them, at the training temperature."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        rollouts: RolloutManager,
        wanted: bool | None = None,
    ) -> None:
        """`wanted`: None for engines of other make; ours are proved by their tests."""
        self._config, self._tokenizer, self._groups, self._rollouts = config, tokenizer, groups, rollouts
        self._rollout = config.actor_rollout_ref.rollout
        self._wanted = names.ROLLOUTS[self._rollout.name].foreign if wanted is None else wanted
        self._proved = 0

    def __call__(self) -> None:
        """After a weight sync: ask engines that were started since the last time; EngineMismatchError ends the run."""
        if not self._wanted or self._proved == self._groups.engine_starts:
            return
        difference, limit = self.measure(), self.limit
        if not difference <= limit:
            raise EngineMismatchError(
                f"{ROLLOUT}.name = {self._rollout.name}: the log-probs it reports differ from training's by"
                f" {difference:.3g} per token on average, and rounding explains {limit:.3g}"
                f" ({self._precisions}, temperature {self._rollout.temperature:g}). It samples from another"
                " distribution than the policy's. Likely causes: the engine computes this model otherwise (positions,"
                " scaling, experts), keeps a copy of weights that the hand-over does not reach, or reports log-probs at"
                f" another temperature. Try {ROLLOUT}.dtype=float32 to rule rounding out, another version of it, or"
                f" {ROLLOUT}.name=native."
            )
        self._proved = self._groups.engine_starts
        logger.info(
            "%s: log-probs of %s are training's, but for %.2g a token (rounding: up to %.2g).",
            *(ROLLOUT, self._rollout.name, difference, limit),
        )

    def measure(self) -> float:
        """Mean |difference| of the two log-probs over the tokens of a few answers, of every replica."""
        prompts = self._prompts()
        answers = self._rollouts.generate(prompts, prompts.meta_info)
        computed = self._groups.infer(self._groups.actor.compute_log_prob, answers, "actor")
        names_read = ("rollout_log_probs", "old_log_probs", "response_mask")
        columns = local_columns(answers.union(computed), names_read, ()).batch
        difference = (columns["rollout_log_probs"] - columns["old_log_probs"]).abs()
        return float(difference[columns["response_mask"].bool()].mean())

    @property
    def limit(self) -> float:
        """Of that mean, what rounding explains: of the coarser side, stretched by a temperature below 1."""
        rounding = _QUANTIZED if self._quantization else max(_ROUNDING[kind] for kind in self._kinds)
        return rounding * max(1.0, 1.0 / self._rollout.temperature)

    @property
    def _quantization(self) -> str | None:
        """As this run has asked for it: servers that run already are as they are, and are held to their dtype."""
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
        """The same few for every replica. Nothing is cut off: then every engine knows what training computes."""
        longest = self._config.data.max_prompt_length
        replicas, ranks = len(self._groups.replicas), self._groups.dp_sizes["actor"]
        each = -(-ranks // (len(_TEXTS) * replicas))  # as many rows as training has ranks, or more
        rows = [self._tokenizer.encode(text)[-longest:] for text in _TEXTS] * replicas * each
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
