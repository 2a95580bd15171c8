"""ServerManager: what a loop generates with. Turns of one request_id stay on one replica, whose cache has their prefix;
a first turn goes where the least is to do. An answer that fails fails its trajectory; one whose replica is lost may go
on elsewhere, from the tokens that were heard of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from verl.agent.loop import TokenOutput
from verl.agent.record import Record, current
from verl.agent.replicas import EngineLost, Replica
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output, Request, SamplingParams
from verl.utils.counter_noise import sample_keys

__all__ = ["ServerManager"]

_OTHER_SPELLINGS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
# The engine tells log-probs always, and of one answer.
_SILENT = frozenset({"logprobs", "n", "skip_special_tokens", "detokenize"})
_SETTABLE = {field.name for field in fields(SamplingParams)} - {"key"}


# An abort is answered at the engine's next token; whoever takes longer is not noted.
_NOTE_S, _NOTING_S = 0.02, 10.0
# Requests more than elsewhere that are worth a prompt computed once.
_NEARLY = 8
# Conversations, and groups, whose replica is known: those of before have ended, or cost a prefix computed again.
_REMEMBERED = 16_384


class ServerManager:
    """For the loops of one generation; the methods are for their event loop's thread."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        params: SamplingParams,
        max_model_len: int,
        client: str,
        first: int = 0,
        vocabulary: int | None = None,
        outlives_replicas: bool = False,
    ) -> None:
        """`params` are the run's; what a loop does not say is theirs. `first`: whose turn it is among equals.
        `vocabulary`: how many tokens the model has; others would break the engine for all.
        `outlives_replicas`: requests of a lost one go on at others, or wait for `renew`.
        """
        self._vocabulary, self._outlives = vocabulary, outlives_replicas
        self._renewed = asyncio.Event()
        self._replicas, self._params, self._max_model_len, self._client = replicas, params, max_model_len, client
        self._home: OrderedDict[str, Replica] = OrderedDict()
        self._group_home: OrderedDict[str, Replica] = OrderedDict()
        self._serial = itertools.count()
        self._turn = first
        self._under_way: dict[str, Replica] = {}
        self._interrupted: set[str] = set()
        """Requests that are to be answered with what there is, and then go on."""
        self.generating = 0
        """Answers that are waited for."""

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        """What the model goes on with after `prompt_ids`.

        `sampling_params` has the names of `SamplingParams`. At most what is left of `rollout.max_new_tokens` since the
        context began, and of `max_model_len`, is generated; where nothing is left, nothing comes, by `length`.
        """
        if image_data is not None or video_data is not None:
            raise ValueError("generate: images and videos are not for this engine. Leave them out.")
        prompt_ids = [int(token) for token in prompt_ids]
        self._check_tokens("prompt_ids", prompt_ids)
        record = current() or Record(key=sample_keys(0, 0, request_id, 0))
        params = self._params_of(sampling_params)
        room = self._max_model_len - len(prompt_ids)
        context = record.context_of(prompt_ids)
        left = min(record.left(context, self._params.max_new_tokens), params.max_new_tokens, room)
        started = time.monotonic()
        if left <= 0:
            output = Output(finish_reason="length")
        else:
            params = replace(
                params,
                key=record.next_key(),
                max_new_tokens=left,
                min_new_tokens=min(left, params.min_new_tokens),
            )
            request = Request(self._new_id(), prompt_ids, params, record.group, record.resumed(prompt_ids))
            self.generating += 1
            try:
                output = await self._answer(request_id, request, record)
            finally:
                self.generating -= 1
        end_ids = params.eos_token_ids | params.stop_token_ids
        record.add(prompt_ids, output, time.monotonic() - started, end_ids, context)
        return _told(output)

    async def note_partials(self) -> None:
        """Have the records note what there is of answers under way: each is aborted, and goes on from what there is."""
        deadline = time.monotonic() + _NOTING_S
        noting = set(self._under_way)
        self._interrupted |= noting
        # Those asked first come back, and wait for their turn again, first.
        while (left := [name for name in self._under_way if name in noting]) and time.monotonic() < deadline:
            for replica in self._replicas:  # again and again: one may overtake the request that it is meant for
                if ids := [name for name in left if self._under_way[name] is replica]:
                    replica.abort(ids)
            await asyncio.sleep(_NOTE_S)

    async def _answer(self, request_id: str, request: Request, record: Record) -> Output:
        """The whole answer, however often it was taken up again."""
        while True:
            replica = self._under_way[request.id] = self._replica_of(request_id, record.group)
            try:
                output = await replica.answer(request)
                is_whole = output.finish_reason != "abort" or request.id not in self._interrupted
            except EngineLost:
                if not self._outlives:
                    raise
                output, is_whole = replica.heard_of(request), False
            finally:
                self._under_way.pop(request.id)
                self._interrupted.discard(request.id)
            if is_whole:
                return output
            so_far = output if output.token_ids else request.resume_from
            if so_far is not None and request.params.key == record.key:
                record.note(list(request.prompt_ids), so_far)
            request = replace(request, id=self._new_id(), resume_from=so_far)
            while all(each.lost for each in self._replicas):
                await self._renewed.wait()

    def renew(self, handles: Sequence[RankHandle]) -> None:
        """Those that were lost are there again, at these handles (one for each replica)."""
        pairs = zip(self._replicas, handles, strict=True)
        self._replicas = [replica.successor(handle) if replica.lost else replica for replica, handle in pairs]
        self._renewed.set()
        self._renewed = asyncio.Event()

    def close(self) -> None:
        """No more answers are waited for."""
        for replica in self._replicas:
            replica.close()

    def _new_id(self) -> str:
        return f"{self._client}/{next(self._serial)}"

    def _replica_of(self, request_id: str, group: str) -> Replica:
        """Where its turns are; at first where the least is to do, or nearly: answers of a group share their prompt."""
        home = self._home.get(request_id)
        if home is not None and not home.lost:
            self._home.move_to_end(request_id)
        else:
            living = [replica for replica in self._replicas if not replica.lost] or self._replicas
            order = [living[(self._turn + step) % len(living)] for step in range(len(living))]
            self._turn += 1
            least = min(order, key=lambda replica: replica.load)
            neighbour = self._group_home.get(group, least)
            near = not neighbour.lost and neighbour.load <= least.load + _NEARLY
            home = self._home[request_id] = self._group_home[group] = neighbour if near else least
            for homes in (self._home, self._group_home):  # of a stream they would be all of the run's
                if len(homes) > _REMEMBERED:
                    homes.popitem(last=False)
        return home

    def _params_of(self, given: Mapping[str, Any]) -> SamplingParams:
        values: dict[str, Any] = {}
        for name, value in given.items():
            known = _OTHER_SPELLINGS.get(name, name)
            if known in _SETTABLE:
                values[known] = _CONVERTED.get(known, lambda same: same)(value)
            elif known not in _SILENT:
                raise ValueError(f"generate: no sampling parameter {name!r}. There are {sorted(_SETTABLE)}.")
        self._check_tokens("logit_bias", [token for token, _ in values.get("logit_bias", ())])
        return replace(self._params, **values)

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < (self._vocabulary or 2**31):
            raise ValueError(f"generate: {name} has tokens beyond the {self._vocabulary} that the model has.")


def _token_set(value: int | Iterable[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value or ())


def _texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _biases(value: Mapping[Any, float] | Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    return tuple((int(token), float(bias)) for token, bias in pairs)


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "eos_token_ids": _token_set,
    "stop_token_ids": _token_set,
    "stop": _texts,
    "logit_bias": _biases,
}


def _told(output: Output) -> TokenOutput:
    reason = "aborted" if output.finish_reason == "abort" else "completed"
    extra = {"versions": list(output.versions), "finish_reason": output.finish_reason}
    return TokenOutput(list(output.token_ids), list(output.log_probs), reason, output.preemptions, extra)
