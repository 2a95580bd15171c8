"""SearchAgentLoop: the search protocol of Search-R1 (Jin et al., arXiv 2503.09516).

The model thinks, searches with `<search> query </search>`, reads the documents between information tags, and ends with
`<answer>`. Observations are tokenised once, separately, and appended. They are excluded from
the loss.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple
from uuid import uuid4

from verl.agent.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register_agent_loop
from verl.config import PPOConfig
from verl.search.client import NO_RESULTS, RetrieverError, Searcher, format_documents, open_searcher
from verl.search.retriever import Hit
from verl.utils.tokenizer import max_characters

__all__ = ["STOPS", "Action", "ObservationEncoder", "SearchAgentLoop", "parse_action"]

logger = logging.getLogger(__name__)

STOPS = ("</search>", "</answer>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
FAILED = "The search failed. Answer without it, or try again."
# Name of the search in the metrics of tools and failures.
TOOL = "search"
_OPENING_TAG = re.compile(r"<(search|answer)>")


@register_agent_loop("search_agent")
class SearchAgentLoop(AgentLoopBase):
    """One trajectory. The trajectories of a process share the searcher: its cache, connections and circuit breaker."""

    searcher: ClassVar[Searcher]

    @classmethod
    def init_class(cls, config: PPOConfig, tokenizer: Any, processor: Any, **own: Any) -> None:
        """Open the searcher."""
        super().init_class(config, tokenizer, processor, **own)
        cls.searcher = open_searcher(config.retriever)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Generate turns until an answer, the length limit, or one turn after `max_turns` searches and invalid actions.

        A failed search counts as a search.
        """
        markers, data = self.config.algorithm.state_masking, self.config.data
        encoder = ObservationEncoder(
            self.tokenizer, markers.start_state_marker, markers.end_state_marker, data.max_obs_length
        )
        statistics = {"calls": 0.0, "errors": 0.0, "seconds": 0.0}
        output = AgentLoopOutput(list(row["prompt_ids"]), [], [], metrics=AgentLoopMetrics(tools={TOOL: statistics}))
        request_id = uuid4().hex
        available = self.rollout_config.max_model_len - len(output.prompt_ids)
        max_response = max(1, min(sampling_params["max_new_tokens"], available))
        sampling_params = sampling_params | {"max_new_tokens": max_response}
        for searches_left in range(self.config.max_turns, -1, -1):
            action, is_last = await self._generate_turn(request_id, output, sampling_params)
            if is_last or action.kind == "answer" or searches_left == 0:
                break
            observation = await self._observe(action, encoder, output.metrics)
            if len(output.response_ids) + len(observation) >= max_response:
                output.finish_reason = "length"  # no tokens left for a turn that reads the observation
                break
            output.response_ids += observation
            output.response_mask += [0] * len(observation)
            output.num_turns += 1
            output.extra_fields.setdefault("turn_names", []).append(action.kind)
        return output

    async def _generate_turn(
        self, request_id: str, output: AgentLoopOutput, sampling_params: dict[str, Any]
    ) -> tuple[Action, bool]:
        """Append the model's next turn to `output`; return its action, and whether no turn can follow."""
        remaining = sampling_params["max_new_tokens"] - len(output.response_ids)
        stops = dict.fromkeys([*(sampling_params.get("stop") or ()), *STOPS])
        max_new_tokens = min(remaining, self.config.data.max_turn_length)
        turn = await self.server_manager.generate(
            request_id=request_id,
            prompt_ids=output.prompt_ids + output.response_ids,
            sampling_params=sampling_params | {"max_new_tokens": max_new_tokens, "stop": list(stops)},
        )
        output.response_ids += turn.token_ids
        output.response_mask += [1] * len(turn.token_ids)
        output.num_turns += 1
        is_last = turn.extra_fields["finish_reason"] == "abort" or not 0 < len(turn.token_ids) < remaining
        return parse_action(self.tokenizer.decode(turn.token_ids)), is_last

    async def _observe(self, action: Action, encoder: ObservationEncoder, metrics: AgentLoopMetrics) -> list[int]:
        """Run a search; return the token ids of the observation after it, or after an invalid action."""
        if action.kind == "invalid":
            metrics.failures["invalid_action"] = metrics.failures.get("invalid_action", 0) + 1
            return encoder.invalid_action()
        statistics, start = metrics.tools[TOOL], time.monotonic()
        try:
            (hits,) = await self.searcher.retrieve([action.content], self.config.retriever.topk)
            return encoder.documents(hits)
        except RetrieverError as error:
            logger.warning("a search failed: %s", error)
            metrics.failures[TOOL] = metrics.failures.get(TOOL, 0) + 1
            statistics["errors"] += 1
            return encoder.search_failed()
        finally:
            seconds = time.monotonic() - start
            statistics["calls"] += 1
            statistics["seconds"] += seconds
            metrics.tool_calls += seconds
            metrics.tool_call_counts += 1


class Action(NamedTuple):
    """The action of a turn; `content` is the query or the answer."""

    kind: Literal["search", "answer", "invalid"]
    content: str = ""


def parse_action(text: str) -> Action:
    """The first complete action in the text of a turn. An empty query or answer is invalid."""
    last = {kind: text.rfind(f"</{kind}>") for kind in ("search", "answer")}
    # The first opening tag with a closing tag anywhere after it. Each closing tag is searched once: linear time.
    opening = next((tag for tag in _OPENING_TAG.finditer(text) if tag.end() <= last[tag[1]]), None)
    if opening is None:
        return Action("invalid")
    content = text[opening.end() : text.find(f"</{opening[1]}>", opening.end())].strip()
    if not content:
        return Action("invalid")
    return Action("search" if opening[1] == "search" else "answer", content)


@dataclass(frozen=True)
class ObservationEncoder:
    """Encodes observations between two markers. `max_tokens` limits one observation, including the markers."""

    tokenizer: Any
    start: str
    end: str
    max_tokens: int

    def documents(self, hits: Sequence[Hit]) -> list[int]:
        """Token ids of search results, truncated at the end."""
        return self.wrap(format_documents(hits).rstrip() or NO_RESULTS)

    def search_failed(self) -> list[int]:
        return self.wrap(FAILED)

    def invalid_action(self) -> list[int]:
        return self._encode(INVALID)[: self.max_tokens]

    def wrap(self, text: str) -> list[int]:
        """Token ids of a text between the markers."""
        before, after = self._encode(f"\n\n{self.start}"), self._encode(f"{self.end}\n\n")
        available = max(0, self.max_tokens - len(before) - len(after))
        content = self._encode(text[: max_characters(self.tokenizer, available)])
        return [*before, *content[:available], *after]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
