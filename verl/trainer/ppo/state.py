"""TrainerState: progress of a run and contents of its checkpoints (actor, critic, prompts, KL controller, version).

RunRecord: dumps of batches and responses, and the share of time per phase.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verl.algos import get_kl_controller
from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.asynchronous.group_state import saved_prompts
from verl.trainer.common.checkpoint import Saver, background_part, load_step
from verl.trainer.common.dumps import dump_batch, dump_rows
from verl.trainer.common.run_start import RunStart, run_parts
from verl.trainer.common.run_status import describe_bottleneck
from verl.trainer.ppo.prompts import PromptStream
from verl.trainer.ppo.row_balancing import concat_prompts
from verl.trainer.ppo.scoring import TOOL_SHARE
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.trainer.recovery.failures import FOLDER, NonFatalFailures

logger = logging.getLogger(__name__)


class RolloutStream(Protocol):
    """Prompts that were submitted ahead of their step and not trained yet, with their responses so far."""

    def state(self, partials: bool) -> dict[str, Any]:
        """Return plain data; with `partials`, unfinished responses too, which takes longer."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from this state."""


_POLICY_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


class TrainerState:
    """The state of the controller that changes from step to step, and its checkpoint folder."""

    prompts: PromptStream
    stream: RolloutStream | None = None
    """None if `trainer.mode` is sync."""

    def __init__(self, config: PPOConfig, workers: Mapping[Role, type], tokenizer: Any) -> None:
        """`workers` maps each role to its worker class."""
        self._config, self._workers = config, workers
        self.step = 0
        """The current step, or the last completed one between steps; the first is 1."""
        self.policy_version = 0
        """Number of actor updates so far; the version of the weights that the next sync sends."""
        self.kl_controller: Any = get_kl_controller(config.algorithm.kl_ctrl)
        self.run_start: RunStart | None = None
        self._kept: dict[str, Any] | None = None
        """The state of the last `keep`."""
        self._restored: dict[str, Any] | None = None
        """The state that `go_back` restored."""
        limits = {"actor": config.trainer.max_actor_ckpt_to_keep}
        if Role.Critic in workers:
            limits["critic"] = config.trainer.max_critic_ckpt_to_keep
        self.saver = Saver(config, limits, tokenizer, lambda: self.run_start)

    def draw_from(self, loader: Any) -> None:
        """Use this dataloader as the source of the prompts."""
        self._loader = loader
        self.prompts = PromptStream(loader, self._config.trainer.total_epochs, self._config.data.gen_batch_size)

    def begin(self) -> RunStart:
        """Run the checks that precede loading the models, unless `run_start` was assigned; return their result."""
        if self.run_start is None:
            self.run_start = check_run_start(self._config, self._workers)
        return self.run_start

    def resume_from(self) -> Path | None:
        """The checkpoint folder that the run continues from, or None."""
        return self.begin().resume_from

    @property
    def first_step(self) -> int | None:
        """The first step that the run will log; None if it only validates."""
        start = self.begin()
        return None if self._config.trainer.val_only else start.first_step

    def end(self) -> None:
        """At the end of a run: stop the data loader processes and release the checkpoint folder."""
        self.prompts.close()
        if not self._config.trainer.val_only:
            self.saver.close()
        if self.run_start is not None:
            self.run_start.close()
            self.run_start = None

    def save(self, groups: WorkerGroups) -> None:
        """Begin to save the current state; `actor/huggingface/` in the checkpoint is usable as `model.path`."""
        policy = next(self._workers[role] for role in _POLICY_ROLES if role in self._workers)
        parts = {"actor": background_part(groups.actor, policy)}
        if groups.critic is not None:
            parts["critic"] = background_part(groups.critic, self._workers[Role.Critic])
        exports = "hf_model" in self._config.actor_rollout_ref.actor.checkpoint.save_contents
        state = self._contents(partials=True) if self._restored is None else self._restored
        self.saver.begin(state, parts, ["actor/huggingface"] if exports else [])

    def keep(self) -> None:
        """Keep a copy of the current state for `go_back`."""
        self._kept = copy.deepcopy(self._contents(partials=False))

    def go_back(self) -> None:
        """After the current step was given up: restore the state of the last `keep`, which later saves write.

        The state on the ranks is unchanged, because only updates change it. The run ends, so the prompts are not reset.
        """
        assert self._kept is not None
        self._restored = kept = self._kept
        self.step, self.policy_version, self.kl_controller.value = (
            kept[name] for name in ("global_steps", "policy_version", "kl_coef")
        )

    def _contents(self, partials: bool) -> dict[str, Any]:
        stream = {} if self.stream is None else {"answers": self.stream.state(partials)}
        return stream | {
            "global_steps": self.step,
            "policy_version": self.policy_version,
            "kl_coef": self.kl_controller.value,
            "prompts": self.prompts.state_dict(),
            "dataloader": self.prompts.loader_state(),
        }

    def load(self, groups: WorkerGroups) -> None:
        """Resume from the newest complete checkpoint or the configured one, if there is one."""

        def read(folder: Path, state: Mapping[str, Any]) -> None:
            self.step, self.policy_version = int(state["global_steps"]), int(state["policy_version"])
            self.kl_controller.value = state["kl_coef"]
            self._loader.load_state_dict(state["dataloader"])
            self.prompts.load_state_dict(state["prompts"])
            stream = state.get("answers")
            if stream is not None and self.stream is not None:
                self.stream.load(stream)
            elif stream is not None and (prompts := saved_prompts(stream)):  # a sync run generates them again
                self.prompts.put_back(concat_prompts(prompts))
            groups.actor.load_checkpoint(str(folder / "actor"))
            if groups.critic is not None:
                groups.critic.load_checkpoint(str(folder / "critic"))

        load_step(self.resume_from(), read)
        self.saver.newest_step = self.step if self.resume_from() is not None else None


def check_run_start(config: PPOConfig, workers: Mapping[Any, type]) -> RunStart:
    """Check the start of a run with these worker classes; return the result."""
    trainer = config.trainer
    folders = {f"trainer.{key}": trainer[key] for key in ("rollout_data_dir", "validation_data_dir")}
    return RunStart(trainer, run_parts(config, workers.values()), folders, saves=not trainer.val_only)


class RunRecord:
    """Writes the dumps of a run and adds up its times. A file that cannot be written is a non-fatal failure."""

    def __init__(self, config: PPOConfig, tokenizer: Any, failures: NonFatalFailures) -> None:
        self._trainer, self._tokenizer, self._failures = config.trainer, tokenizer, failures
        self._seconds: Counter[str] = Counter()
        self._tool_shares: list[float] = []

    def dump(self, batch: DataProto, step: int, harmful: bool) -> None:
        """Write the batch if `trainer.dump_steps` has the step or its update was `harmful`, and the responses if
        `trainer.rollout_data_dir` is set."""
        if step in self._trainer.dump_steps or harmful:
            folder = self._trainer.default_local_dir
            dumped = self._failures.dump(FOLDER, folder, step, partial(dump_batch, batch, folder, step))
            if dumped is not None:
                logger.info("batch of step %d written to %s", step, dumped)
        if (responses_folder := self._trainer.rollout_data_dir) is not None:
            write = partial(dump_rows, batch, self._tokenizer, responses_folder, step)
            self._failures.dump("trainer.rollout_data_dir", responses_folder, step, write)

    def add(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Add the seconds per phase and the metrics of a step."""
        self._seconds.update(seconds)
        if TOOL_SHARE in metrics:
            self._tool_shares.append(metrics[TOOL_SHARE])

    def bottleneck(self) -> str:
        """Return one line: the phase that took most of the time, and remedies."""
        return describe_bottleneck(dict(self._seconds), sum(self._tool_shares) / max(1, len(self._tool_shares)))
