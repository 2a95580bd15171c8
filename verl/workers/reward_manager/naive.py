"""NaiveRewardManager: one call of the reward function per answer, its score on the answer's last token."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

import torch

from verl.protocol import DataProto
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.registry import call_with_accepted
from verl.workers.reward_manager.explain import describe_sample, why_all_zero
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.scorer import Sample, Score, ScorerPool

logger = logging.getLogger(__name__)

FAILED = "scoring_failed"
_MOST_PROCESSES = 16
_POLICIES = {"fail": "the run stops", "zero": "they score 0", "mask": "they score 0 and are not trained on"}


class RewardError(RuntimeError):
    """A sample could not be scored, and `reward_model.on_error` is `fail`."""


@register("naive")
class NaiveRewardManager:
    """Scores every answer with `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    The function runs in scorer processes (`num_processes`; 0: here, without a time limit), each call for at most
    `timeout` seconds. A call that raises, hangs, dies or returns no finite number costs its own sample: `on_error` says
    whether the run stops (`fail`), the sample scores 0 (`zero`), or is also taken out of training (`mask`, done by
    `verl.trainer.ppo.reward.compute_reward`). `num_examine` samples per data source are logged in every call.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        on_error: str = "mask",
        timeout: float = 60.0,
        num_processes: int | None = None,
    ) -> None:
        if on_error not in _POLICIES:
            raise ValueError(f"reward_model.on_error: {on_error!r} is not one of {', '.join(_POLICIES)}.")
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.on_error = on_error
        processes = min(_MOST_PROCESSES, _available_cores()) if num_processes is None else num_processes
        self._pool = ScorerPool(functools.partial(call_with_accepted, self.compute_score), processes, timeout)
        self._first_call = True

    def submit(self, sample: Sample) -> Future[Score]:
        """The primitive: score one answer in a scorer process. A failed call is a Score with an `error`."""
        return self._pool.submit(sample)

    @overload
    def __call__(self, data: DataProto, return_dict: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def __call__(self, data: DataProto, return_dict: Literal[True]) -> dict[str, Any]: ...
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """[batch, response] scores, each on the last token the model sampled and 0 elsewhere.

        With `return_dict`: `reward_tensor`, and `reward_extra_info` with a list of one value per row for every field
        that the function returned (None where it did not), and `scoring_failed` (1.0 where there is no score).
        A batch with `rm_scores` was scored by a reward model; those are the result.
        """
        if "rm_scores" in data.batch:
            reward, extra = data.batch["rm_scores"], {}
        else:
            samples = self.samples(data)
            scores = [future.result() for future in [self.submit(sample) for sample in samples]]
            self._report(samples, scores)
            reward, extra = self._place(data, scores), _columns(scores)
        return {"reward_tensor": reward, "reward_extra_info": extra} if return_dict else reward

    def samples(self, data: DataProto) -> list[Sample]:
        """What the reward function is told of each row; text is decoded from the tokens that are there, no padding."""
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(-1).tolist()
        tokens = [row[: int(length)] for row, length in zip(responses.tolist(), lengths, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [self._sample(data.non_tensor_batch, row, text) for row, text in enumerate(texts)]

    def close(self) -> None:
        """End the scorer processes. The next call starts new ones."""
        self._pool.close()

    def _sample(self, columns: Mapping[str, Any], row: int, text: str) -> Sample:
        if self.reward_fn_key not in columns:
            raise ValueError(
                f"data.reward_fn_key: the batch has no {self.reward_fn_key!r} (found: {', '.join(columns)}). Set it to "
                "the column that says which reward function scores a row."
            )
        reward = columns["reward_model"][row] if "reward_model" in columns else None
        truth = (reward or {}).get("ground_truth")
        if truth is None and "ground_truth" in columns:
            truth = columns["ground_truth"][row]
        extra = columns["extra_info"][row] if "extra_info" in columns else None
        return Sample(columns[self.reward_fn_key][row], text, truth, dict(extra or {}))

    def _place(self, data: DataProto, scores: Sequence[Score]) -> torch.Tensor:
        responses = data.batch["responses"]
        width = responses.shape[1]
        mask = (data.batch["response_mask"] if "response_mask" in data.batch else data.batch["attention_mask"])[
            :, -width:
        ]
        reward = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        positions = torch.arange(1, width + 1, device=responses.device)
        last = (mask.bool() * positions).amax(-1) - 1 if width else mask.new_full((len(scores),), -1)
        rows = torch.nonzero(last >= 0).squeeze(-1)
        values = torch.tensor([score.value for score in scores], dtype=torch.float32, device=responses.device)
        reward[rows, last[rows]] = values[rows]
        return reward

    def _report(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        """Log failures with one example, a few samples, and at the first call why all scores are 0, if they are."""
        failed = [(sample, score) for sample, score in zip(samples, scores, strict=True) if score.error is not None]
        if failed:
            sample, score = failed[0]
            message = (
                f"reward: {len(failed)} of {len(scores)} samples could not be scored (reward_model.on_error="
                f"{self.on_error}: {_POLICIES[self.on_error]}). The first: {score.error}\n{describe_sample(sample)}"
            )
            if self.on_error == "fail":
                raise RewardError(message)
            logger.warning("%s", message)
        shown: Counter[str] = Counter()
        for sample, score in zip(samples, scores, strict=True):
            shown[sample.data_source] += 1
            if shown[sample.data_source] <= self.num_examine:
                logger.info("score %g %s\n%s", score.value, score.extra or "", describe_sample(sample))
        if self._first_call and scores and len(failed) < len(scores) and not any(score.value for score in scores):
            logger.warning("%s", why_all_zero(samples, own_function=self.compute_score is not default_compute_score))
        self._first_call = False


def _columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for score in scores for name in score.extra)
    columns: dict[str, list[Any]] = {name: [score.extra.get(name) for score in scores] for name in names}
    columns[FAILED] = [float(score.error is not None) for score in scores]
    return columns


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
