"""GatewayAgentLoop: runs a user's agent that calls the model over HTTP, and records its requests in a session."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import secrets
import threading
import traceback
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from verl.agent.gateway.app import MAX_REWARD, GatewayApp
from verl.agent.gateway.session import GatewaySession, Generate, Model, Sessions
from verl.agent.gateway.tree import Path, Tree
from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, TrajectoryFailed
from verl.config import PPOConfig
from verl.inference.serving.api import ApiError
from verl.inference.serving.openai_requests import ModelInfo
from verl.types.request import Output, Request
from verl.utils.concurrency import SharedEventLoop
from verl.utils.exceptions import RemoteTraceback
from verl.utils.http_server.server import ConnectionLimits, LocalServer
from verl.utils.import_utils import ImportPath, load_user_object
from verl.utils.tokenizer import longest_token
from verl.utils.tool_calls import get_parser
from verl.workers.rollout.call_trace import current_trace

__all__ = ["GatewayAgentLoop", "build_outputs", "describe_failure", "load_agent", "start_agent"]

# Agents of this worker keep connections open while they run tools.
_HTTP_LIMITS = ConnectionLimits(connections=8192, idle_seconds=600, grace_seconds=1)
# Parameters of every `run_agent` function.
_PARAMETERS = ("base_url", "prompt", "request_kwargs", "metadata")
_agent_event_loop = SharedEventLoop("agents")
_OUT_OF_TOKENS = "this trajectory has used up its tokens (rollout.max_new_tokens, or max_model_len)."


class GatewayAgentLoop(AgentLoopBase):
    """Calls `run_agent(base_url, prompt, request_kwargs, metadata, **agent_kwargs)` and waits for it.

    Sampling parameters (temperature, top_p …) are those of the run: clients can only limit the length and add stop
    strings. The reward is taken from the first of: the posted reward_info, the return value of run_agent, the run's
    reward function.
    """

    user_objects = ("run_agent",)
    end_token_ids: ClassVar[frozenset[int]] = frozenset()
    """Ids of the tokens at which the engine ends a turn."""

    def __init__(
        self,
        *,
        run_agent: str | ImportPath,
        timeout: float = 600.0,
        request_kwargs: Mapping[str, Any] | None = None,
        agent_kwargs: Mapping[str, Any] | None = None,
        keep_retries: bool = False,
        **base: Any,
    ) -> None:
        """`run_agent`: file.py:function or pkg.module.function. `timeout`: seconds that it may run.

        `request_kwargs`: passed to run_agent, which passes them to the requests of its client. `agent_kwargs`: further
        keyword arguments of run_agent. `keep_retries`: see `Tree.paths`.
        """
        super().__init__(**base)
        self._timeout, self._keep_retries = timeout, keep_retries
        self._request_kwargs, self._agent_kwargs = dict(request_kwargs or {}), dict(agent_kwargs or {})
        self._function = load_agent(run_agent, self._agent_kwargs)

    @classmethod
    def init_class(cls, config: PPOConfig, tokenizer: Any, processor: Any, **options: Any) -> None:
        """Check the configuration entry before the first trajectory. `options`: keys of the entry."""
        if "run_agent" not in options:
            raise ValueError("GatewayAgentLoop: its entry has no run_agent. Add run_agent: file.py:function.")
        load_agent(options["run_agent"], options.get("agent_kwargs", ()))
        cls.end_token_ids = frozenset(options.get("end_token_ids", ()))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        trace, max_turns = current_trace(), self.rollout_config.multi_turn.max_assistant_turns
        session = GatewaySession(uuid.uuid4().hex, self._generator(sampling_params), max_turns)
        session.on_full_context = None if trace is None else trace.add_empty_call
        async with _worker_gateway(self).session(session) as base_url:
            agent_future, failure = await self._run_agent(base_url, row)
        reward_info = session.reward_info
        # A posted reward makes the trajectory valid even if the agent failed afterwards.
        if reward_info is None:
            if failure is not None:
                raise failure
            reward_info = _returned_info(agent_future.result())
        outputs = build_outputs(session.tree, self._keep_retries)
        if not outputs:
            requests = session.tree.counts.total()
            message = f"run_agent received no complete response (requests: {requests}, cut off: {session.cut_off})."
            raise TrajectoryFailed(message, "no_request")
        _set_metrics_and_reward(outputs, session, reward_info, failure)
        return outputs

    async def _run_agent(
        self, base_url: str, row: Mapping[str, Any]
    ) -> tuple[asyncio.Future[Any], TrajectoryFailed | None]:
        """Run the agent until it returns, raises or times out; return its future and its failure."""
        future = start_agent(
            self._function,
            base_url=base_url,
            prompt=row["raw_prompt"],
            request_kwargs=dict(self._request_kwargs),
            metadata={name: value for name, value in row.items() if name not in ("raw_prompt", "prompt_ids")},
            **self._agent_kwargs,
        )
        agent_future = asyncio.wrap_future(future)
        try:
            await asyncio.wait({agent_future}, timeout=self._timeout)
            return agent_future, self._failure(agent_future, base_url)
        finally:
            agent_future.cancel()

    def _failure(self, agent: asyncio.Future[Any], base_url: str) -> TrajectoryFailed | None:
        """The error of the agent, without the secret of its session; None: it returned."""
        if not agent.done():
            return TrajectoryFailed(f"run_agent did not return within {self._timeout:g} s.", "timeout")
        error = asyncio.CancelledError("run_agent cancelled its own task") if agent.cancelled() else agent.exception()
        return None if error is None else describe_failure(error, base_url)

    def _generator(self, sampling_params: Mapping[str, Any]) -> Generate:
        """Return the function that generates the responses of this trajectory with the EngineClient.

        The server calls it in its own tasks. Each call runs in a copy of the current context, which contains the trace
        of this trajectory.
        """
        context, request_id = contextvars.copy_context(), uuid.uuid4().hex

        async def generate(request: Request) -> AsyncGenerator[Output, None]:
            """Yield the whole output at once. ApiError if the trajectory has no tokens left."""
            limits = {
                "max_new_tokens": min(request.params.max_new_tokens, sampling_params["max_new_tokens"]),
                "stop": [*sampling_params["stop"], *request.params.stop],
                "stop_token_ids": [*sampling_params["stop_token_ids"], *request.params.stop_token_ids],
            }
            generation = self.server_manager.generate(
                request_id=request_id, prompt_ids=request.prompt_ids, sampling_params={**sampling_params, **limits}
            )
            # A task copies the current context; the argument `context` needs Python 3.11.
            output = await context.copy().run(asyncio.get_running_loop().create_task, generation)
            if not output.token_ids:
                raise ApiError(_OUT_OF_TOKENS, code="context_length_exceeded")
            yield Output(
                token_ids=output.token_ids,
                log_probs=output.log_probs,
                versions=output.extra_fields["versions"],
                finish_reason=output.extra_fields["finish_reason"],
                raw_log_probs=output.log_probs,
            )

        return generate


def load_agent(import_path: str | ImportPath, extra_params: Iterable[str] = ()) -> Callable[..., Any]:
    """Load a run_agent function from `file.py:function` or `pkg.module.function`.

    It must accept `_PARAMETERS` and `extra_params` as keyword arguments.
    """
    path = ImportPath.read(import_path) if isinstance(import_path, str) else import_path
    return load_user_object(path.module, path.name, key="run_agent", required_params=(*_PARAMETERS, *extra_params))


def start_agent(function: Callable[..., Any], **arguments: Any) -> Future[Any]:
    """Start a run_agent function with these arguments; return the future of its result.

    A coroutine function runs in an event loop that all agents of the process share, any other function in its own
    thread. Neither runs in the event loop of the gateway, which a blocking agent would stop.
    """
    if inspect.iscoroutinefunction(function):
        return _agent_event_loop.submit(_run_coroutine(function, arguments))
    future: Future[Any] = Future()
    threading.Thread(target=_run_in_thread, args=(future, function, arguments), name="agent", daemon=True).start()
    return future


async def _run_coroutine(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return await function(**arguments)
    except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop of all agents
        raise RuntimeError(f"the agent tried to exit the process ({error!r})") from error


def _run_in_thread(future: Future[Any], function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(**arguments))
    except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
        future.set_exception(error)


def describe_failure(error: BaseException, base_url: str) -> TrajectoryFailed:
    """The error of a run_agent function without the secret of its session: HTTP clients put URLs into messages."""
    secret, trace = base_url.rpartition("~")[2], "".join(traceback.format_exception(error))
    message = f"run_agent raised {type(error).__name__}: {error}".replace(secret, "<secret>")
    failed = TrajectoryFailed(message, "exception")
    failed.__cause__ = RemoteTraceback(trace.replace(secret, "<secret>")) if secret in trace else error
    return failed


def build_outputs(tree: Tree, keep_retries: bool) -> list[AgentLoopOutput]:
    """One row per path of the tree. Tokens and turns that several paths share are trained and counted only once."""
    outputs, seen_requests = [], set[int]()
    for path in tree.paths(keep_retries):
        output = _build_output(path)
        # Turns: the trained responses, and their requests, unless an earlier row has counted them.
        responses = [node for node, trained in zip(path.nodes, path.trained, strict=True) if trained]
        new_requests = {id(node.request) for node in responses} - seen_requests
        output.num_turns = len(responses) + len(new_requests)
        seen_requests |= new_requests
        outputs.append(output)
    return outputs


def _build_output(path: Path) -> AgentLoopOutput:
    """The row of a path. The first request is its prompt; later requests are context tokens of the response."""
    output = AgentLoopOutput(list(path.nodes[0].request.context_ids), [], [], [], response_versions=[])
    assert output.response_logprobs is not None
    assert output.response_versions is not None
    for number, (node, trained) in enumerate(zip(path.nodes, path.trained, strict=True)):
        context, sampled = (node.request.context_ids if number else []), node.output
        output.response_ids += [*context, *sampled.token_ids]
        output.response_mask += [0] * len(context) + [int(trained)] * len(sampled.token_ids)
        output.response_logprobs += [0.0] * len(context) + sampled.log_probs
        output.response_versions += [-1] * len(context) + sampled.versions
    output.messages = [*path.nodes[-1].request.conversation, path.nodes[-1].reply]
    return output


def _returned_info(returned: Any) -> dict[str, Any] | None:
    """The reward_info in the return value of run_agent: {reward: …}, or {reward_info: {reward: …}}."""
    if returned is None:
        return None
    if not isinstance(returned, dict):
        raise TrajectoryFailed(
            f"run_agent returned {returned!r:.200}. Return a dict with a reward, or None.", "exception"
        )
    return returned.get("reward_info", returned)


def _set_metrics_and_reward(
    outputs: list[AgentLoopOutput],
    session: GatewaySession,
    reward_info: Mapping[str, Any] | None,
    failure: TrajectoryFailed | None,
) -> None:
    """Set the metrics of the first row, and the reward of the last one."""
    counts = session.tree.counts
    failures = {"branch": counts["branch"], "retry": counts["retry"], "cut_off": session.cut_off}
    if failure is not None:
        failures[failure.kind] = 1
    outputs[0].metrics = AgentLoopMetrics(failures={kind: count for kind, count in failures.items() if count})
    outputs[-1].extra_fields["reward_info"] = None if reward_info is None else dict(reward_info)
    reward = None if reward_info is None else reward_info.get("reward")
    outputs[-1].reward_score = None if reward is None else _parse_reward(reward)


def _parse_reward(reward: Any) -> float:
    """The reward as a number. Non-finite or very large rewards would make the group's advantages non-finite."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= MAX_REWARD:
        raise TrajectoryFailed(
            f"the agent's reward is {reward!r:.200}. It must be a number from {-MAX_REWARD:g} to {MAX_REWARD:g}.",
            "exception",
        )
    return value


# ---------------------------------------------------------------- one server for all sessions of a worker


class WorkerGateway:
    """The HTTP server of a worker for the sessions of its trajectories; it runs while there are sessions."""

    def __init__(self, model: Model) -> None:
        self._model, self._sessions = model, Sessions()
        self._stack: AsyncExitStack | None = None
        self._address = ""
        self._stopping: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def session(self, session: GatewaySession) -> AsyncGenerator[str, None]:
        """Open a session; yield its URL, which contains a secret that other agents do not know."""
        secret = secrets.token_urlsafe(32)
        self._sessions.add(session, secret)
        if self._stack is None:
            self._stack = AsyncExitStack()
            app = GatewayApp(self._sessions, self._model)
            self._address = await self._stack.enter_async_context(LocalServer(app, "agents", _HTTP_LIMITS))
        try:
            yield f"{self._address}/sessions/{session.name}~{secret}"
        finally:
            await self._sessions.close(session)
            if not self._sessions and self._stack is not None:
                # In the background: closing connections that agents left open takes a moment.
                task = asyncio.create_task(self._stack.aclose())
                self._stopping.add(task)
                task.add_done_callback(self._stopping.discard)
                self._stack = None


_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, WorkerGateway] = WeakKeyDictionary()


def _worker_gateway(loop: GatewayAgentLoop) -> WorkerGateway:
    """Return the gateway of this worker (one per event loop)."""
    if loop.loop not in _gateways:
        model_info = ModelInfo(
            (loop.config.actor_rollout_ref.model.path,),
            loop.rollout_config.max_model_len,
            len(loop.tokenizer),
            loop.end_token_ids,
            max_responses=1,
            client_templates=False,
            longest_token=longest_token(loop.tokenizer),
        )
        parser = get_parser(loop.rollout_config.multi_turn.format)
        template_kwargs = loop.apply_chat_template_kwargs
        _gateways[loop.loop] = WorkerGateway(Model(model_info, loop.tokenizer, parser, template_kwargs, grammars=False))
    return _gateways[loop.loop]
