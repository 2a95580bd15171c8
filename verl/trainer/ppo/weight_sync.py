"""WeightSync: sends the policy's weights to the rollout engines, once per version.

From here to the engine: `ActorRolloutRefWorker` (`workers/roles/policy.py`) sends the weights by
`workers/sharding_manager` to `BaseRollout.begin_update`, `load_bucket` and `finish_update` of the engine, which
`VllmWeights` (`workers/rollout/vllm_rollout`) implements for vLLM.

ReplicaWeights: whether all rollout replicas have verified weights of the trainer's version. `WorkerRecovery` restarts
and readmits a lost replica. `RolloutHosts` assigns rows to replicas, `EngineClient` assigns the requests of agents.

EngineProbe checks after a sync that a third-party engine, or one with LoRA adapters, computes the same log-probs as
training.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from verl.config import PPOConfig, names
from verl.config.layout import ROLLOUT
from verl.config.rollout import applies_lora
from verl.protocol import DataProto, object_array
from verl.single_controller.base.worker_group import WorkerCallError, WorkerDiedError
from verl.trainer.common.training_health import TrainingStoppedError
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.trainer.ppo.row_balancing import local_columns
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.types.request import EngineDiedError
from verl.types.weights import WeightsRefusedError
from verl.utils.exceptions import cause_chain
from verl.utils.model import compute_position_id_with_mask
from verl.utils.transfer_group import TransferLostError

logger = logging.getLogger(__name__)

# When the sender or a receiver has failed, wait this long for the end of the other call.
_PEER_END_S = 10.0
# Prompts with which the log-probs of trainer and engine are compared.
_TEXTS = ("The capital of France is", "1, 2, 3, 5, 8,", "def add(a, b):\n", "Once upon a time there was a")
_NEW_TOKENS = 16
# Upper bounds for the mean absolute difference of log-probs per token that rounding can cause. Logits reach 20 to 30.
# Summation in another order changes them by about one rounding error, on average 2^-9 relative in bfloat16, 2^-12 in
# float16, 2^-25 in float32. The mean over tokens is then 0.01 to 0.03 in bfloat16, an eighth of that in float16, 1e-5
# in float32. A wrong temperature, layer or weight changes the mean by some tenths; the bounds are in between.
_ROUNDING = {"bfloat16": 0.1, "bf16": 0.1, "float16": 0.02, "fp16": 0.02, "float32": 1e-3, "fp32": 1e-3}
# The same bound for an engine with quantised weights (fp8).
_QUANTIZED = 0.3
# The share of the adapters' effect that an engine must show, and the largest standard error with which it is compared.
_MIN_ADAPTER_SHARE = 0.5
_MAX_SHARE_ERROR = 0.1


class UnverifiedWeightsError(RuntimeError):
    """Replicas would have generated with weights that are not the trainer's current ones."""


@dataclass(slots=True)
class ReplicaWeights:
    """Versions of the weights of a rollout that has its own processes. A sync or a restart concerns all replicas."""

    current_version: int = 0
    """The trainer's version."""
    verified_version: int | None = None
    """Version of the replicas' weights, whose fingerprints match the trainer's; None: unknown (not synced since their
    start, or a sync is running or has failed)."""

    @property
    def are_current(self) -> bool:
        return self.verified_version == self.current_version

    def require_current(self) -> None:
        """Raise UnverifiedWeightsError unless all replicas have verified weights of the current version."""
        if not self.are_current:
            raise UnverifiedWeightsError(
                f"rollout: the replicas have verified weights of version {self.verified_version}; the trainer's"
                f" weights have version {self.current_version}."
            )


class WeightSync:
    """Syncs weights from the actor's worker group to the rollout's: within shared processes, or between groups."""

    def __init__(
        self, groups: WorkerGroups, probe: Callable[[int], None] = lambda version: None, kv: str = "recompute"
    ) -> None:
        """`probe(version)` is called at the end of every `sync` and may send requests to the engines. `kv`: whether
        running requests keep or recompute their KV cache after a sync (`trainer.partial_kv`)."""
        self._groups, self._probe, self._kv = groups, probe, kv
        self._paused = False
        self.replica_weights = ReplicaWeights()
        """Set by `sync`; `WorkerRecovery` resets the verified version before a restart."""

    def connect(self) -> None:
        """Create the process group for weight transfer if trainer and engines run in different processes."""
        actor, rollout = self._groups.actor, self._groups.rollout
        if rollout is not actor:
            address, receivers = actor.transfer_address()[0], rollout.world_size
            for joining in [group.join_transfer(address, receivers) for group in (actor, rollout)]:
                joining.get()

    def release_weights(self) -> None:
        """After the rollout of a step, free the weights of engines that share devices with the trainer, until `sync`.

        A generation that is not finished continues during training and keeps its memory, unless it must be paused.
        """
        is_open = self._groups.generation_open
        if is_open:
            self._paused = self._groups.pauses_for_training
            if self._paused:
                self._groups.rollout.pause_rollout(free_kv=self._groups.frees_partial_kv)
        if self._groups.frees_weights and (self._paused or not is_open):
            self._groups.actor.free_rollout_weights()

    def sync(self, version: int) -> None:
        """Send the weights of this version to all engines that do not have it. Running requests continue with it."""
        self.replica_weights.current_version = version
        if self._groups.rollout is self._groups.actor:
            self._groups.actor.update_rollout_weights(version, self._kv)  # no effect if the engines have the version
        else:
            self._sync_between_groups(version)
        self.resume_generation()
        self._probe(version)

    def require_current_weights(self) -> None:
        """Raise UnverifiedWeightsError if replicas in their own processes lack verified weights of this version."""
        if self._groups.rollout is not self._groups.actor:
            self.replica_weights.require_current()

    def resume_generation(self) -> None:
        """Resume a generation that `release_weights` has paused, with the current weights of the engines."""
        if self._paused:
            self._groups.rollout.resume_rollout()
            self._paused = False

    def _sync_between_groups(self, version: int) -> None:
        weights = self.replica_weights
        if weights.are_current:
            return
        weights.verified_version = None
        self._send(version)
        # Every engine has verified the fingerprints of the received weights; otherwise `_send` has raised.
        weights.verified_version = version

    def _send(self, version: int) -> None:
        """Run the sending and the receiving call concurrently. A receiver that leaves the transfer ends the sender's
        call, too."""
        actor, rollout = self._groups.actor, self._groups.rollout
        sending, receiving = actor.send_weights(version), rollout.receive_weights(version, self._kv)
        receiver_errors: list[Exception] = []
        sender_ended, abandoned = threading.Event(), threading.Event()

        def receive() -> None:
            try:
                receiving.get()
            except Exception as error:  # noqa: BLE001 - raised below, by the thread that waits for the sender
                receiver_errors.append(error)
                if abandoned.is_set():
                    return  # the groups may have been restarted since
                died = isinstance(error, WorkerDiedError)
                if died:
                    rollout.shutdown()  # a gloo sender blocks until the connections are closed
                # A worker whose engine died stays in the transfer.
                if died or not (engine_died(error) or sender_ended.wait(_PEER_END_S)):
                    actor.abort_transfer()  # an NCCL sender blocks until its communicator is aborted

        receiver = threading.Thread(target=receive, name="weights-received", daemon=True)
        receiver.start()
        sender_errors: list[Exception] = []
        try:
            sending.get()
        except WorkerCallError as error:
            sender_errors.append(error)
        finally:
            sender_ended.set()
        receiver.join(_PEER_END_S if sender_errors else None)
        abandoned.set()
        if errors := [*_causes(sender_errors, receiver_errors), *sender_errors, *receiver_errors]:
            raise errors[0]


def _causes(sender_errors: list[Exception], receiver_errors: list[Exception]) -> list[Exception]:
    """Return the receivers' errors that explain those of the sender: the death of a worker or engine, or, if the sender
    only reports a lost connection or refused weights, another error, such as too little memory."""
    errors = list(receiver_errors)
    for error in receiver_errors:
        errors += error.others if isinstance(error, WorkerCallError) else ()
    deaths = [error for error in errors if isinstance(error, WorkerDiedError) or engine_died(error)]
    if deaths or not all(is_lost_transfer(error) or _is_refusal(error) for error in sender_errors):
        return deaths
    return [error for error in errors if not is_lost_transfer(error)]


def _is_refusal(error: Exception) -> bool:
    return any(isinstance(cause, WeightsRefusedError) for cause in cause_chain(error))


def engine_died(error: BaseException) -> bool:
    """Return whether a worker lost the separate process of its engine."""
    return any(isinstance(cause, EngineDiedError) for cause in cause_chain(error))


def is_lost_transfer(error: BaseException) -> bool:
    """Return whether a weight sync failed because the connection between trainer and receivers was lost."""
    return any(isinstance(cause, TransferLostError) for cause in cause_chain(error))


class EngineMismatchError(TrainingStoppedError):
    """The engine's log-probs differ from the policy's by more than rounding."""


@dataclass(frozen=True)
class ProbeResult:
    """Log-probs of the engine compared with those of training."""

    difference: float
    """Mean absolute difference per token."""
    adapter_share: float | None = None
    """Share of the effect of the LoRA adapters on log-probs that the engine shows: 1 if it applies them, 0 if it does
    not. None: rounding exceeds the effect, or there are no adapters."""


def _shown_share(engine: torch.Tensor, training: torch.Tensor, base: torch.Tensor) -> float | None:
    """Return `ProbeResult.adapter_share`. Log-probs [tokens]; `base`: those of training without adapters.

    It is the coefficient of a regression through the origin, None if its standard error is too large.
    """
    shown, effect = (engine - base).double(), (training - base).double()
    size = float(effect.norm())
    if size == 0 or len(effect) < 2:
        return None
    share = float(shown @ effect) / size**2
    error = float((shown - share * effect).norm()) / (size * math.sqrt(len(effect) - 1))
    return share if error < _MAX_SHARE_ERROR else None


class EngineProbe:
    """Checks that the engine computes the same distribution as training, at the training temperature. Fingerprints of
    the weights cannot show that."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        rollouts: RolloutManager,
        enabled: bool | None = None,
    ) -> None:
        """`enabled`: None enables the check for third-party engines and engines that apply LoRA adapters; tests cover
        the others."""
        self._config, self._tokenizer, self._groups, self._rollouts = config, tokenizer, groups, rollouts
        self._rollout = config.actor_rollout_ref.rollout
        self._has_adapters = applies_lora(config.actor_rollout_ref.model, self._rollout)
        third_party = names.rollout_traits(self._rollout.name).third_party
        self._enabled = third_party or self._has_adapters if enabled is None else enabled
        self._checked_starts = 0
        self._version: int | None = None
        self._versions_since_start = 0
        self._adapters_verified = False

    def __call__(self, version: int) -> None:
        """After a sync of weights of this version, check the engines if any of them was started since the last call.
        Raises EngineMismatchError, which ends the run.

        Newly initialised adapters (B = 0) do not change the model, so that the first check cannot show that they are
        applied: versions 2, 4, 8 … since the start are checked too, until the effect of the adapters exceeds rounding.
        """
        if not self._enabled or not self._is_due(version):
            return
        result, limit = self.measure(), self.limit
        difference, share = result.difference, result.adapter_share
        if share is not None and not share >= _MIN_ADAPTER_SHARE:
            raise EngineMismatchError(
                f"{ROLLOUT}.name = {self._rollout.name}: its log-probs show {share:.0%} of the effect of the LoRA"
                " adapters. The engine does not apply them, or applies others than training. Set"
                f" {ROLLOUT}.engine_kwargs.native.merge_lora=true to generate with merged weights."
            )
        if not difference <= limit:
            raise EngineMismatchError(
                f"{ROLLOUT}.name = {self._rollout.name}: its log-probs differ from those of training by"
                f" {difference:.3g} per token on average, but rounding explains at most {limit:.3g}"
                f" ({self._precisions}, temperature {self._rollout.temperature:g}). The engine does not sample from the"
                " policy's distribution. Likely causes: the engine computes this model differently (positions,"
                " scaling, experts), keeps a copy of weights that the weight sync does not update, or reports log-probs"
                f" at another temperature. Try {ROLLOUT}.dtype=float32 to exclude rounding, another version of the"
                f" engine, or {ROLLOUT}.name=native."
            )
        self._checked_starts = self._groups.engine_starts
        self._adapters_verified = share is not None
        logger.info(
            "%s: log-probs of %s and of training differ by %.2g per token (rounding: up to %.2g).%s",
            *(ROLLOUT, self._rollout.name, difference, limit),
            "" if share is None else f" They show {share:.0%} of the effect of the LoRA adapters.",
        )

    def _is_due(self, version: int) -> bool:
        if self._checked_starts != self._groups.engine_starts:
            self._version, self._versions_since_start, self._adapters_verified = None, 0, False
        if version == self._version:
            return False
        self._version = version
        self._versions_since_start += 1
        count = self._versions_since_start
        is_power_of_two = count & (count - 1) == 0
        return count == 1 or (self._has_adapters and not self._adapters_verified and is_power_of_two)

    def measure(self) -> ProbeResult:
        """Compare the log-probs of engine and training over the tokens of a few responses of every replica."""
        prompts = self._prompts()
        batch = self._rollouts.generate(prompts, prompts.meta_info)
        columns_read = ["rollout_log_probs", "old_log_probs", "response_mask"]
        # Not compiled: training may never run these passes, and compiling them takes longer than a step.
        batch = batch.union(self._groups.infer(self._groups.actor.compute_log_prob, batch, "actor", eager=True))
        if self._has_adapters:
            batch = batch.union(self._groups.infer(self._groups.actor.compute_ref_log_prob, batch, "ref", eager=True))
            columns_read.append("ref_log_prob")
        columns = local_columns(batch, columns_read, ()).batch
        mask = columns["response_mask"].bool()
        engine, training = columns["rollout_log_probs"][mask], columns["old_log_probs"][mask]
        difference = float((engine - training).abs().mean())
        if not self._has_adapters:
            return ProbeResult(difference)
        return ProbeResult(difference, _shown_share(engine, training, columns["ref_log_prob"][mask]))

    @property
    def limit(self) -> float:
        """Largest value of `measure` that rounding in the dtype with the lower precision can cause. It grows with
        1 / temperature for temperatures below 1."""
        rounding = _QUANTIZED if self._quantization else max(_ROUNDING[dtype] for dtype in self._dtypes)
        return rounding * max(1.0, 1.0 / self._rollout.temperature)

    @property
    def _quantization(self) -> str | None:
        """Quantization of the engine; None for servers of the user (`server_urls`), whose quantization is unknown."""
        return None if self._rollout.server_urls else self._rollout.quantization

    @property
    def _dtypes(self) -> tuple[str, str]:
        """The dtypes of the engine and of training."""
        actor = self._config.actor_rollout_ref.actor
        return self._rollout.dtype, actor[names.TRAINING_ENGINES[actor.strategy].block].mixed_precision

    @property
    def _precisions(self) -> str:
        engine, trainer = self._dtypes
        return f"engine {self._quantization or engine}, training {trainer}"

    def _prompts(self) -> DataProto:
        """Return the same prompts for every replica. Sampling is not truncated (top-k, top-p, min-p), so that the
        log-probs of engine and training can be compared."""
        longest = self._config.data.max_prompt_length
        replicas, ranks = self._groups.replica_count, self._groups.dp_sizes["actor"]
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
        meta = {"step": 0, "seed": self._rollout.seed, "pad_token_id": self._tokenizer.pad_token_id}
        columns = {
            "uid": object_array([f"probe-{number}" for number in range(len(rows))]),
            "sample_index": object_array([0] * len(rows)),
            "agent_name": object_array([names.SINGLE_TURN] * len(rows)),
        }
        return DataProto.from_dict(tensors, columns, {**meta, **sampling, **ending})
