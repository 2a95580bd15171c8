"""ActorRolloutRefWorker: actor, rollout and reference policy, alone or combined in one worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl.config import ActorRolloutRefConfig, RolloutConfig, as_config
from verl.config.engine import CheckpointConfig
from verl.config.layout import runs_in_own_process
from verl.config.rollout import applies_lora
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, MeshPlace, make_nd_compute_dataproto_dispatch_fn, register
from verl.types.request import EngineDiedError
from verl.utils.device import resolve_dtype
from verl.utils.exceptions import fields_as_keys
from verl.utils.fs import resolve_model_path
from verl.utils.transfer_group import TransferAddress, TransferGroup, TransferHost
from verl.workers.roles.policy_loss import ROW, PolicyLoss, require_experts
from verl.workers.roles.training import (
    CheckpointedWorker,
    explain_out_of_memory,
    infer_columns,
    log_prob_micro_batching,
    mini_batches_of_call,
    run_epochs,
    start_engine,
    update_micro_batching,
)
from verl.workers.rollout.base import BaseRollout, Load
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.training_rows import experts_template, with_object_columns
from verl.workers.sharding_manager import BroadcastReceiver, BroadcastSender, InProcessTransfer

logger = logging.getLogger(__name__)

# The engines of a worker, by role.
PARTS_OF_ROLE = {
    "actor": {"actor"},
    "rollout": {"rollout"},
    "ref": {"ref"},
    "actor_rollout": {"actor", "rollout"},
    "actor_rollout_ref": {"actor", "rollout", "ref"},
}


class ActorRolloutRefWorker(CheckpointedWorker):
    """One rank of the policy with the parts of `role`: actor, rollout, ref, actor_rollout, actor_rollout_ref."""

    def __init__(self, config: Any, role: str) -> None:
        if str(role) not in PARTS_OF_ROLE:
            raise ValueError(f"ActorRolloutRefWorker: role {role!r}; use one of {sorted(PARTS_OF_ROLE)}.")
        self.config = as_config(ActorRolloutRefConfig, config)
        self.parts = PARTS_OF_ROLE[str(role)]
        self.rollout: Any = None
        self._rollout_version = -1
        """Version of the engine's weights; -1: the engine has none."""
        self._policy_version = 0
        """Version of the last weight sync."""
        self._actor_changed = False
        """Whether the actor was trained or loaded since the last weight sync."""
        self._kv_freed = False
        """Whether `pause_rollout` has freed the KV cache."""
        self._sender: BroadcastSender | None = None
        self._receiver: BroadcastReceiver | None = None
        self.host: EngineHost | None = None
        """Executes rollout jobs and requests of EngineClients while generation is open."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, model_path: str | None = None) -> None:
        """Start the engines of this worker's parts with the model at `model_path` (default:
        `actor_rollout_ref.model.path`).

        A collective, except for a rank that is a whole rollout replica: it is started and restarted independently.
        """
        independent = self.parts == {"rollout"} and self.config.rollout.tensor_model_parallel_size == 1
        if independent and self.rollout is not None:
            return  # still running: only another replica was restarted
        if not independent:
            self.init_process_group()
        elif self.device_name == "cuda":
            torch.cuda.set_device(self.device)
        self.model_path = resolve_model_path(model_path or self.config.model.path, "actor_rollout_ref.model.path")
        if "actor" in self.parts:
            self._init_actor()
        if "ref" in self.parts and not self._actor_is_reference:
            config = self.config
            self.ref_engine = start_engine(self, "ref", self.model_path, "causal_lm", config.model, config.ref)
            self.ref_engine.offload()
        if "rollout" in self.parts:
            self._init_rollout()

    # ---------------------------------------------------------------- training

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    @explain_out_of_memory("old_log_prob", config_root="actor_rollout_ref")
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return `old_log_probs` and `entropys` [batch, response], at the sampling temperature."""
        columns = {"log_probs": "old_log_probs", "entropy": "entropys"}
        if self.config.actor.router_replay.mode == "R2":
            columns["routed_experts"] = "routed_experts"
        require_experts(self.config.actor, data, ("R3",))
        with self.engine.on_device(optimizer=False):
            micro = log_prob_micro_batching(self.config.rollout)
            return infer_columns(self.engine, data, columns, self._temperature(data), micro)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    @explain_out_of_memory("update_actor", config_root="actor_rollout_ref")
    def update_actor(
        self, data: DataProto, ppo_epochs: int | None = None, ppo_mini_batch_size: int | None = None
    ) -> DataProto:
        """Train on a batch for `ppo_epochs` epochs and return metrics in `meta_info["metrics"]`. Arguments override the
        configuration.

        Without `old_log_probs` in the batch, this pass computes and returns them; the update must then be one optimizer
        step.
        """
        actor = self.config.actor
        epochs = actor.ppo_epochs if ppo_epochs is None else ppo_epochs
        mini_batches = mini_batches_of_call(
            data, ppo_mini_batch_size, actor.ppo_mini_batch_size, self.config.rollout.n, self.engine
        )
        own_old_log_probs = "old_log_probs" not in data.batch.keys()
        loss = PolicyLoss(
            actor, own_old_log_probs, data.meta_info.get("distillation"), data.meta_info.get("correction")
        )
        if loss.own_old_log_probs:
            if epochs * len(mini_batches) > 1:
                raise ValueError(
                    "update_actor: several optimizer steps require old_log_probs. Call compute_log_prob first."
                )
            data = data.select()
            data.batch[ROW] = torch.arange(len(data))
        self._actor_changed = True
        # Experts of R2 come from compute_log_prob, which did not run if this pass computes the old log-probs.
        require_experts(actor, data, ("R3",) if loss.own_old_log_probs else ("R2", "R3"))
        with self.engine.on_device():
            result = run_epochs(
                self.engine,
                data,
                loss,
                loss.outputs,
                temperature=self._temperature(data),
                micro=update_micro_batching(actor),
                mini_batches=mini_batches,
                epochs=epochs,
                prefix="actor",
            )
            if not loss.own_old_log_probs or not self.engine.collects:
                return result
            return DataProto.from_dict({"old_log_probs": loss.old_log_probs(len(data))}, meta_info=result.meta_info)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"))
    @explain_out_of_memory("ref", config_root="actor_rollout_ref")
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return `ref_log_prob` [batch, response] under the reference policy: with LoRA, the actor without adapters."""
        engine, columns = self.ref_engine, {"log_probs": "ref_log_prob"}
        with engine.on_device(optimizer=False), engine.base_weights():
            micro = log_prob_micro_batching(self.config.ref)
            return infer_columns(engine, data, columns, self._temperature(data), micro)

    def mesh_place(self, name: str) -> MeshPlace:
        """Raise ValueError with a remedy for calls that need a reference policy on a worker without one."""
        if name == "ref" and name not in self._meshes:
            raise ValueError(
                f"compute_ref_log_prob: this worker ({sorted(self.parts)}) has no reference policy. Call it on"
                " trainer.ref_policy_wg, or start the worker with the role actor_rollout_ref."
            )
        return super().mesh_place(name)

    # ---------------------------------------------------------------- generation

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    @explain_out_of_memory("gen", config_root="actor_rollout_ref")
    def generate_sequences(self, prompts: DataProto, **sampling: Any) -> DataProto:
        """Generate one batch: one response per row. `sampling` overrides the configured sampling parameters
        (`temperature=0.7`).

        Rows keep their object columns. If the engine in the actor's process does not have the actor's current weights,
        they are synced first, so that a script may call this directly after `init_model` or `update_actor`. The trainer
        calls it only if a subclass of this class or of BaseRollout overrides it; otherwise it submits rows to `host`.
        """
        if "actor" in self.parts and (self._rollout_version < 0 or self._actor_changed):
            self._sync_rollout(self._policy_version)
        self._free_device_cache()
        self.rollout.resume()
        try:
            with fields_as_keys("actor_rollout_ref.rollout", RolloutConfig):
                generated = self.rollout.generate_sequences(prompts, **sampling)
            self.check_cancelled()
            return with_object_columns(generated, prompts)
        finally:
            # After a failure too: the run may continue, and all ranks that share an engine must release.
            self._release_kv()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("gen", config_root="actor_rollout_ref")
    def begin_generation(self) -> str:
        """Open `host`, which executes rollout jobs and requests of EngineClients until `end_generation`; return its id.

        It may stay open for many steps, during training and weight syncs. No effect if it is open already.
        """
        if self.host is None or self.host.closed:
            self._free_device_cache()
            self.rollout.resume()
            self.host = self._new_host()
        return self.host.id

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("gen", config_root="actor_rollout_ref")
    def end_generation(self) -> None:
        """Close `host`; raise the error of the engine, if it has failed."""
        try:
            if self.host is not None and not self.host.closed:
                self.host.close()
        finally:
            self.rollout.wait_idle()
            self._release_kv()

    def _new_host(self) -> EngineHost:
        return EngineHost(self.rollout, partial(experts_template, self.config.model, self.config.rollout))

    def _release_kv(self) -> None:
        """Free the KV cache if training uses the same devices and the configuration allows it."""
        if self.config.rollout.free_cache_engine and "actor" in self.parts:
            self.rollout.release(["kv_cache"])

    def _engine_load(self) -> Load | None:
        """Return the load of this rank's engine for `RankUsage`; None if it has none, or another rank reports it."""
        if self.rollout is None or not self.rollout.is_leader:
            return None
        with suppress(EngineDiedError):  # the call that needs the engine reports it
            return self.rollout.load()
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def overrides_generate_sequences(self) -> bool:
        """Whether this class or the rollout's class overrides `generate_sequences`: the trainer then calls it."""
        own = type(self).generate_sequences is not ActorRolloutRefWorker.generate_sequences
        return own or type(self.rollout).generate_sequences is not BaseRollout.generate_sequences

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pause_rollout(self, free_kv: bool = False) -> None:
        """Pause all running requests until `resume_rollout`, so that the ranks of an engine can run other collectives.

        `free_kv`: also free the KV cache; requests recompute theirs afterwards.
        """
        self.rollout.pause_generation("keep")
        self.rollout.wait_idle()
        if free_kv:
            self.rollout.release(["kv_cache"])
            self._kv_freed = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def resume_rollout(self) -> None:
        """Resume the requests paused by `pause_rollout`."""
        if self._kv_freed:
            self.rollout.resume(["kv_cache"])
            self._kv_freed = False
        self.rollout.resume_generation()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def cancel(self) -> bool:
        """Cancel the running call, as in every worker; `generate_sequences` ends at the next token."""
        cancelled = super().cancel()
        if cancelled and self._computing == "generate_sequences":
            self.rollout.abort()
        return cancelled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_rollout_weights(self, version: int, kv: str = "recompute") -> None:
        """Copy the trainer's weights to the engine of the same process, unless the engine has this version already.

        Running requests are paused meanwhile, and continue with the new weights. `kv`: whether their KV is recomputed
        (`recompute`) or kept (`keep`).
        """
        if version != self._rollout_version:
            self._sync_rollout(version, kv)

    def _sync_rollout(self, version: int, kv: str = "recompute") -> None:
        self._free_device_cache()
        with self._weight_update(kv), self.engine.on_device(optimizer=False):
            self._transfer.sync(version)
        self._rollout_version = self._policy_version = version
        self._actor_changed = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def free_rollout_weights(self) -> None:
        """Free the engine's weights, whose memory training needs, until the next weight sync."""
        self.rollout.release(["weights"])
        self._rollout_version = -1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restart_engine(self) -> None:
        """Restart the engine if it has its own process and that has ended. The next weight sync sends all weights."""
        self._rollout_version = -1
        self._free_device_cache()
        self.rollout.restart_if_dead()
        if self.host is not None and self.host.failed and not self.host.closed:
            with suppress(Exception):  # raises the error of the old engine, which the caller handles by this restart
                self.host.close()
            self.host = self._new_host()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    @explain_out_of_memory("gen", config_root="actor_rollout_ref")
    def raise_engine_error(self) -> None:
        """Raise the error of the engine, if it has failed while generation is open."""
        if self.host is not None and not self.host.closed:
            self.host.raise_if_failed()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def transfer_address(self) -> TransferAddress | None:
        """Return the address at which engines of other processes connect to rank 0 for weights; None on other ranks."""
        if self.rank != 0:
            return None
        self._transfer_host = TransferHost(self.get_master_addr_port()[0])
        return self._transfer_host.address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def join_transfer(self, address: TransferAddress, receivers: int) -> None:
        """Join a new process group for weights: rank 0 of the trainer sends, every rollout rank receives.

        `receivers`: number of rollout ranks.
        """
        backend = "nccl" if self.device_name == "cuda" else "gloo"
        if "actor" in self.parts:
            self.abort_transfer()
            group = None
            if self.rank == 0:
                group = TransferGroup(self._transfer_host, 0, 1 + receivers, backend, self.device)
            dtype = resolve_dtype(self.config.rollout.dtype, self.device)
            self._sender = BroadcastSender(group, dtype, self._bucket_bytes)
        else:
            if self._receiver is not None:
                self._receiver.group.abort()
            group = TransferGroup(address, 1 + self.rank, 1 + receivers, backend, self.device)
            self._receiver = BroadcastReceiver(group)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control", blocking=False)
    def abort_transfer(self) -> None:
        """Abort the process group for weights, so that a send that waits for a lost receiver fails."""
        if self._sender is not None and self._sender.group is not None:
            self._sender.group.abort()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int) -> None:
        """Send the trainer's weights to the engines of other processes, as `version`."""
        assert self._sender is not None, "requires join_transfer"
        with self.engine.on_device(optimizer=False):
            unmerged = self.engine.unmerged() if applies_lora(self.config.model, self.config.rollout) else None
            self._sender.send(self.engine if unmerged is None else unmerged, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, version: int, kv: str = "recompute") -> None:
        """Receive the weights of `version` from the trainer's processes; `kv` as in `update_rollout_weights`."""
        assert self._receiver is not None, "requires join_transfer"
        with self._weight_update(kv):
            self._receiver.receive(self.rollout)
        self._rollout_version = version

    @contextmanager
    def _weight_update(self, kv: str) -> Iterator[None]:
        """Context of a weight update. With kv="keep", running requests are paused and keep their KV; otherwise the
        update recomputes their KV."""
        if kv != "keep" or self.host is None or self.host.closed:
            yield
            return
        with suppress(EngineDiedError):  # the update raises it on all ranks
            self.rollout.pause_generation("keep", kv)
        try:
            yield
        finally:
            with suppress(EngineDiedError):
                self.rollout.resume_generation()

    # ---------------------------------------------------------------- checkpoints

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.actor.checkpoint

    def load_checkpoint(self, path: str) -> None:
        super().load_checkpoint(path)
        self._actor_changed = True

    # ---------------------------------------------------------------- internals

    def _init_actor(self) -> None:
        actor, model = self.config.actor, self.config.model
        router_replay = actor.router_replay.mode != "disabled"
        self.engine = start_engine(
            self, "actor", self.model_path, "causal_lm", model, actor, actor.optim, actor.grad_clip, router_replay
        )
        if self._actor_is_reference:
            self.ref_engine = self.engine
            self.register_mesh_place("ref", self.engine.dp_rank, collect=self.engine.collects)
        self.engine.offload()

    def _free_device_cache(self) -> None:
        """Release torch's cached memory for the rollout engine's own process on the same devices."""
        if self.device.type == "cuda" and "actor" in self.parts and runs_in_own_process(self.config.rollout):
            torch.cuda.empty_cache()
            if self.config.rollout.tensor_model_parallel_size > 1:
                dist.barrier()  # the engine allocates on all devices of its group

    def _init_rollout(self) -> None:
        self._free_device_cache()
        with fields_as_keys("actor_rollout_ref.rollout", RolloutConfig):
            self.rollout = open_rollout(self.model_path, self.config.model, self.config.rollout, self.device)
        if "actor" in self.parts:
            self._transfer = InProcessTransfer(self.engine, self.rollout, self._bucket_bytes)
        self._release_kv()  # the first weight sync loads the trainer's weights onto the same device
        # The ranks of a tensor-parallel engine receive the same rows; results are collected from the first.
        ranks = self.config.rollout.tensor_model_parallel_size
        self.register_mesh_place("rollout", self.rank // ranks, collect=self.rank % ranks == 0)
        metrics = self.config.rollout.prometheus
        if metrics.enable and self.rank % ranks == 0:
            from verl.workers.rollout.prometheus import serve_metrics  # imports a web server

            serve_metrics(self.rollout, self.rank // ranks, metrics.port + self.rank // ranks)

    @property
    def _bucket_bytes(self) -> int:
        return self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20

    @property
    def _actor_is_reference(self) -> bool:
        """Whether the actor without adapters is the reference policy (LoRA)."""
        return "actor" in self.parts and self.config.model.lora_rank > 0

    def _temperature(self, data: DataProto) -> float:
        return float(data.meta_info.get("temperature", self.config.rollout.temperature))
