"""AgentLoopWorker: a process that runs agent loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from verl.agent.host import AgentHost
from verl.agent.loop import AgentLoopBase, LoopSpec, find_loop
from verl.agent.tool_files import ToolFiles
from verl.agent.toolbox import Toolbox
from verl.config import PPOConfig, as_config
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.sandbox.code_runner import CodeSettings, configure
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    BatchShard,
    Dispatch,
    DispatchGroup,
    PerRank,
    join_results,
    register,
)
from verl.single_controller.base.worker_group import RankHandle
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.training_rows import empty_experts

__all__ = ["AgentLoopWorker"]


def _split_rows(group: DispatchGroup, data: DataProto, *others: Any) -> PerRank:
    """Consecutive rows for each rank, as evenly as possible, without filler rows: agents may have side effects. Other
    arguments go to all ranks."""
    if not len(data):
        raise ValueError("the batch is empty: it has no rows to split over the ranks.")
    edges = np.linspace(0, len(data), group.world_size + 1).round().astype(int)
    shards = [BatchShard(data[int(start) : int(end)]) for start, end in pairwise(edges)]
    return [shards, *([other] * group.world_size for other in others)], {}


_SPLIT_ROWS: Mapping[str, Callable[..., Any]] = {"dispatch_fn": _split_rows, "collect_fn": join_results}


class AgentLoopWorker(Worker):
    """One of `rollout.agent.num_workers` processes. It has one event loop for its lifetime, so that tools can keep
    connections open between batches."""

    def __init__(self, config: Any, loops: Mapping[str, LoopSpec], tools: ToolFiles | None = None) -> None:
        """`loops`: entries of `agent_loop_config_path`. `tools`: files that define tools and simulated users."""
        self.config = as_config(PPOConfig, config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        model = self.config.actor_rollout_ref.model
        folder = resolve_model_path(model.path, "actor_rollout_ref.model.path")
        self.tokenizer = hf_tokenizer(folder, trust_remote_code=model.trust_remote_code)
        self.processor = hf_processor(folder, trust_remote_code=model.trust_remote_code)
        config_of_model = read_config(folder, model.trust_remote_code, model.override_config)
        self.vocabulary: int = config_of_model.get_text_config().vocab_size
        template, stops = self.config.data.apply_chat_template_kwargs, self.rollout_config.stop_token_ids
        self.end_tokens = find_end_tokens(folder, config_of_model, self.tokenizer, template, stops)
        self._empty_experts = partial(empty_experts, model, self.rollout_config)
        self._loops = dict(loops)
        self._ready: set[type[AgentLoopBase]] = set()
        self.host: AgentHost | None = None
        """Executes rollout jobs of the trainer's RolloutManager."""
        self._batch_host: AgentHost | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agent-loops", daemon=True).start()
        configure(CodeSettings.from_config(self.config.sandbox, self.config.sandbox_fusion))
        self.toolbox = Toolbox.load(self.rollout_config.multi_turn, tools)
        # Report invalid tools or loops at start.
        asyncio.run_coroutine_threadsafe(self.toolbox.check(), self._loop).result()
        self.loop_class(self.rollout_config.agent.default_agent_loop)

    @register(dispatch_mode=_SPLIT_ROWS)
    def generate_sequences(self, prompts: DataProto, replicas: Sequence[RankHandle]) -> DataProto:
        """Generate one batch: a trajectory per row, in order; the rows of a trajectory are adjacent.

        `replicas`: engines with open generation (see `begin_generation`). Reads the same columns as
        `BaseRollout.generate_sequences`. The trainer calls it only if a subclass (`agent.agent_loop_manager_class`)
        overrides it, in `trainer.mode=sync`; otherwise rows go to `host`.
        """
        if not len(prompts):
            return DataProto()
        host = self._batch_host = AgentHost(self, replicas, self._loop, self._empty_experts)
        try:
            self.check_cancelled()  # `cancel` may have been called before the host existed
            return host.generate_batch(prompts)
        finally:
            self._batch_host = None
            host.close()
            self.check_cancelled()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def cancel(self) -> bool:
        """Cancel the running call, as in every worker; its trajectories are cancelled."""
        cancelled = super().cancel()
        if cancelled and (host := self._batch_host) is not None:
            host.interrupt()
        return cancelled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def open_host(self, replicas: Sequence[RankHandle]) -> str:
        """Open `host` for rollout jobs, or reconnect an open host to restarted replicas; return its id."""
        if self.host is None or self.host.closed:
            self.host = AgentHost(self, replicas, self._loop, self._empty_experts)
        else:
            self.host.renew_replicas(replicas)
        return self.host.id

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def close_host(self) -> None:
        """End the jobs of `host`."""
        if self.host is not None:
            self.host.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def close(self) -> None:
        """Call this at the end of a run: it releases the tools and stops MCP servers that the worker started."""
        asyncio.run_coroutine_threadsafe(self.toolbox.close(), self._loop).result()

    def loop_class(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class of a loop and the keywords of its configuration entry. Calls `init_class` on first use."""
        cls, keywords = find_loop(name, self._loops)
        if cls not in self._ready:
            shared = {"toolbox": self.toolbox, "end_token_ids": self.end_tokens.turn_ids}
            cls.init_class(self.config, self.tokenizer, self.processor, **shared, **keywords)
            self._ready.add(cls)
        return cls, keywords
