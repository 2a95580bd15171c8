"""AgentLoopWorker: a process that runs agent loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.agent.dispatch import SPLIT_ROWS
from verl.agent.host import AgentHost
from verl.agent.loop import AgentLoopBase, LoopSpec, find_loop
from verl.agent.tool_files import ToolFiles
from verl.agent.toolbox import Toolbox
from verl.config import PPOConfig, as_config
from verl.models.loading import read_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.handle import RankHandle
from verl.utils.code_runner import CodeSettings, configure
from verl.utils.end_tokens import find_end_tokens
from verl.utils.fs import resolve_model_path
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.output import empty_experts

__all__ = ["AgentLoopWorker"]


class AgentLoopWorker(Worker):
    """One of `rollout.agent.num_workers` processes. Its event loop lives as long as it does: tools keep connections."""

    def __init__(self, config: Any, loops: Mapping[str, LoopSpec], tools: ToolFiles | None = None) -> None:
        """`loops` are the entries of `agent_loop_config_path`; `tools` what tools and simulated users are made of."""
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
        configure(CodeSettings.of(self.config.sandbox, self.config.sandbox_fusion))
        self.toolbox = Toolbox.load(self.rollout_config.multi_turn, tools)
        # What is wrong with the tools or the loop is said now.
        asyncio.run_coroutine_threadsafe(self.toolbox.check(), self._loop).result()
        self.loop_class(self.rollout_config.agent.default_agent_loop)

    @register(dispatch_mode=SPLIT_ROWS)
    def generate_sequences(self, prompts: DataProto, replicas: Sequence[RankHandle]) -> DataProto:
        """Run one batch: a trajectory for every row, all rows of a trajectory together, in order.

        `replicas` are the engines, between `begin_generation` and `end_generation`. Reads the columns that
        `BaseRollout.generate_sequences` reads. A subclass (`agent.agent_loop_manager_class`) may override it for
        `trainer.mode=sync`.
        """
        if not len(prompts):
            return DataProto()
        host = self._batch_host = AgentHost(self, replicas, self._loop, self._empty_experts)
        try:
            self.check_cancelled()  # a cancel that came before there was a host to close
            return host.generate_batch(prompts)
        finally:
            self._batch_host = None
            host.close()
            self.check_cancelled()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def cancel(self) -> bool:
        """As of every worker; trajectories end where they wait."""
        cancelled = super().cancel()
        if cancelled and (host := self._batch_host) is not None:
            host.interrupt()
        return cancelled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def open_host(self, replicas: Sequence[RankHandle]) -> str:
        """Open `host` for rollout jobs, or reconnect an open one to replicas that were restarted; return its id."""
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
        """At the end of a run: tools release what they still hold, and MCP servers of its own end."""
        asyncio.run_coroutine_threadsafe(self.toolbox.close(), self._loop).result()

    def loop_class(self, name: str) -> tuple[type[AgentLoopBase], Mapping[str, Any]]:
        """The class of a loop and its own keywords; the class is made ready when it is first asked for."""
        found, keywords = find_loop(name, self._loops)
        if found not in self._ready:
            shared = {"toolbox": self.toolbox, "end_token_ids": self.end_tokens.turn_ids}
            found.init_class(self.config, self.tokenizer, self.processor, **shared, **keywords)
            self._ready.add(found)
        return found, keywords
