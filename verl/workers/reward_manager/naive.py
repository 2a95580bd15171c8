"""NaiveRewardManager: one call of the reward function per response; the score is on the response's last token.

The other managers override one step: how responses are scored (`score`), or how scores are modified (`shape_scores`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

import numpy as np
import torch

from verl.algos.masked_ops import at_last_token
from verl.protocol import DataProto
from verl.utils.progress import count_futures
from verl.utils.resources import available_cores
from verl.utils.reward_score import default_compute_score, score_function
from verl.utils.reward_score.registry import UNKNOWN_SOURCE
from verl.workers.reward_manager.registry import register_reward_manager
from verl.workers.reward_manager.scorer import ERROR_COLUMN, Sample, Score, ScorerPool

logger = logging.getLogger(__name__)

# Column that every manager adds, with `ERROR_COLUMN`: 1.0 if a row could not be scored.
FAILED_COLUMN = "scoring_failed"
# Column of the row's number in the generation request, by which scores are found after rows were reordered or filtered.
ROW_COLUMN = "row"
_MAX_PROCESSES = 16
# Values of `reward_model.on_error`, and their effect on samples that could not be scored, for messages.
POLICIES = {"fail": "the run stops", "zero": "they score 0", "mask": "they score 0 and are not trained on"}

_LOGGED_CHARACTERS = 600
FinishedResponses = Sequence[tuple[int, np.ndarray]]
"""(row number in the batch, token ids of the response)."""


class RewardError(RuntimeError):
    """A sample could not be scored, and `reward_model.on_error` is `fail`."""


class ScoresAhead:
    """Scores responses as they finish, while others of their batch are still being generated.

    Scores are looked up by row number, not by text: two rows with the same text may get different scores.
    """

    def __init__(
        self,
        make_samples: Callable[[FinishedResponses], list[Sample]],
        submit: Callable[[Sample], Future[Score]],
    ) -> None:
        self._make_samples, self._submit = make_samples, submit
        self._scores: dict[int, tuple[np.ndarray, Sample, Future[Score]]] = {}
        """By row number: token ids, sample and score."""
        self.submitted = 0
        """Number of responses submitted for scoring."""

    def add(self, finished: FinishedResponses) -> None:
        """Submit these responses for scoring."""
        if not finished:
            return
        for (row, tokens), sample in zip(finished, self._make_samples(finished), strict=True):
            self._scores[row] = tokens, sample, self._submit(sample)
        self.submitted += len(finished)

    def take(self, row: int, tokens: Any) -> tuple[Sample, Future[Score]] | None:
        """Remove and return the sample and score of a row; None if it was not added, or its response has changed."""
        entry = self._scores.pop(row, None)
        if entry is None or not np.array_equal(entry[0], tokens):
            return None
        return entry[1], entry[2]

    @classmethod
    def joined(cls, parts: Sequence[ScoresAhead], size: int) -> ScoresAhead:
        """The concatenation of `parts`, which have `size` rows each."""
        joined = cls(parts[0]._make_samples, parts[0]._submit)
        for number, part in enumerate(parts):
            joined._scores |= {number * size + row: entry for row, entry in part._scores.items()}
        joined.submitted = len(joined._scores)
        return joined


@register_reward_manager("naive")
class NaiveRewardManager:
    """Scores every response with `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    The function runs in scorer processes (`num_processes`; 0: in this process, without limits). Each call is limited to
    `timeout` seconds, each process to `memory_limit_gb` beyond its memory at the start (None: no limit). If a call
    raises, times out, crashes or returns no finite number, only its sample fails, and `on_error` decides: the run stops
    (`fail`), the sample scores 0 (`zero`), or it is also excluded from training (`mask`, done by
    `verl.trainer.ppo.scoring.score_responses`). `num_examine` samples per data source are logged in every call.
    `skip_special_tokens=False` keeps special tokens in the text that the function gets.
    """

    required_arguments: tuple[str, ...] = ("solution_str", "ground_truth")
    """Parameters that a user's reward function must have."""
    optional_arguments: tuple[str, ...] = ("data_source", "extra_info", "raw_prompt")
    """Parameters that are passed if the function has them."""
    takes_lists = False
    """Whether the function gets lists of responses."""
    batch_size: int | None = 1
    """Maximum length of the lists; None: the whole batch."""

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
        memory_limit_gb: float | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        if on_error not in POLICIES:
            raise ValueError(f"reward_model.on_error: {on_error!r} is not one of {', '.join(POLICIES)}.")
        for name, limit in {"timeout": timeout, "memory_limit_gb": memory_limit_gb}.items():
            if limit is not None and not limit > 0:
                raise ValueError(f"reward_model.reward_kwargs.{name}: {limit} is not positive. Set it above 0.")
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.on_error = on_error
        self.skip_special_tokens = skip_special_tokens
        self.last_failure: str | None = None
        """Error message of the last call about samples that could not be scored; None: all were."""
        processes = min(_MAX_PROCESSES, available_cores()) if num_processes is None else num_processes
        memory_limit = None if memory_limit_gb is None else int(memory_limit_gb * 2**30)
        self._pool = ScorerPool(self.compute_score, processes, timeout, memory_limit, self.takes_lists, self.batch_size)
        self._uses_processes = processes > 0
        self._reads_prompts = not {"raw_prompt", "raw_prompts"}.isdisjoint(
            inspect.signature(self.compute_score).parameters
        )
        self._ahead: ScoresAhead | None = None
        self._first_call = True

    def submit(self, sample: Sample) -> Future[Score]:
        """Score one response in a scorer process. A failed call gives a Score with an `error`."""
        return self._pool.submit(sample)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score all samples and return the scores in order."""
        return self._pool.score(samples)

    def shape_scores(self, data: DataProto, scores: Sequence[Score]) -> Sequence[Score]:
        """The final scores of the rows; subclasses may override it."""
        return scores

    @overload
    def __call__(self, data: DataProto, return_dict: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def __call__(self, data: DataProto, return_dict: Literal[True]) -> dict[str, Any]: ...
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Return scores [batch, response]: each on the last token that the model sampled, 0 elsewhere.

        With `return_dict`: `reward_tensor`, and `reward_extra_info` with a list of one value per row for every field
        that the function returned (None if it did not), `scoring_failed` (1.0 if there is no score) and `scoring_error`
        (the kind of error, or None). If the batch has `rm_scores` from a reward model, they are the result.
        """
        if "rm_scores" in data.batch:
            reward, extra = data.batch["rm_scores"], {}
        else:
            samples, function_scores = self._score_batch(data)
            self._report(samples, function_scores)
            scores = self.shape_scores(data, function_scores)
            reward, extra = _reward_tensor(data, scores), _extra_columns(scores)
        return {"reward_tensor": reward, "reward_extra_info": extra} if return_dict else reward

    def samples(self, data: DataProto) -> list[Sample]:
        """The input of the reward function for each row; the text is decoded from the response without padding."""
        return self._samples(data.non_tensor_batch, list(enumerate(_response_tokens(data))))

    def score_ahead(self, columns: Mapping[str, Any]) -> ScoresAhead | None:
        """Begin to score responses to rows with these columns as they finish. The next call of the manager uses these
        scores; its batch must have the column `row`: the number of each row in `columns`.

        None if responses are not scored one by one in processes, or if a subclass overrides how they are scored.
        """
        overridden = [
            name for name in _SINGLE_SCORING if getattr(type(self), name) is not getattr(NaiveRewardManager, name)
        ]
        self._ahead = None
        has_source = self.reward_fn_key in columns or self.compute_score is not default_compute_score
        if not (overridden or self.takes_lists) and self._uses_processes and has_source:
            self._ahead = ScoresAhead(functools.partial(self._samples, columns), self.submit)
        return self._ahead

    def use_ahead(self, parts: Sequence[ScoresAhead], size: int) -> int:
        """Use the scores of `parts`, of `size` rows each, in the next call; return the number of scores."""
        self._ahead = ScoresAhead.joined(parts, size)
        return self._ahead.submitted

    @property
    def scored_again(self) -> int:
        """Total number of samples scored again because their scorer process was killed or stopped from outside."""
        return self._pool.scored_again

    def bind(self, **arguments: Any) -> None:
        """Pass these arguments to the reward function from now on, if it has such parameters."""
        parameters = inspect.signature(self.compute_score).parameters
        bound = {name: value for name, value in arguments.items() if name in parameters}
        if bound:
            self.compute_score = functools.partial(self.compute_score, **bound)
            self._pool = self._pool.with_function(self.compute_score)

    def close(self) -> None:
        """End the scorer processes. The next call starts new ones."""
        self._pool.close()

    def _score_batch(self, data: DataProto) -> tuple[list[Sample], list[Score]]:
        """The samples and scores of all rows; scores that were started ahead are only waited for."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ROW_COLUMN not in data.non_tensor_batch:
            samples = self.samples(data)
            return samples, self.score(samples)
        rows = data.non_tensor_batch[ROW_COLUMN]
        entries = [ahead.take(int(row), tokens) for row, tokens in zip(rows, _response_tokens(data), strict=True)]
        submitted = count_futures(
            [entry[1] for entry in entries if entry is not None], len(entries) - entries.count(None)
        )
        missing = [row for row, entry in enumerate(entries) if entry is None]
        missing_samples = self.samples(data.select_idxs(missing)) if missing else []
        scored_now = iter(zip(missing_samples, self.score(missing_samples), strict=True))
        scored_ahead = iter([future.result() for future in submitted])
        pairs = [next(scored_now) if entry is None else (entry[0], next(scored_ahead)) for entry in entries]
        return [sample for sample, _ in pairs], [score for _, score in pairs]

    def _samples(self, columns: Mapping[str, Any], responses: FinishedResponses) -> list[Sample]:
        tokens = [token_ids for _, token_ids in responses]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=self.skip_special_tokens)
        return [self._sample(columns, row, text) for (row, _), text in zip(responses, texts, strict=True)]

    def _sample(self, columns: Mapping[str, Any], row: int, text: str) -> Sample:
        if self.reward_fn_key not in columns and self.compute_score is default_compute_score:
            raise ValueError(
                f"data.reward_fn_key: the batch has no {self.reward_fn_key!r} column. Set it to the column that selects"
                f" the reward function of a row. Columns: {', '.join(columns)}."
            )
        source = columns[self.reward_fn_key][row] if self.reward_fn_key in columns else UNKNOWN_SOURCE
        reward = columns["reward_model"][row] if "reward_model" in columns else None
        truth = (reward or {}).get("ground_truth")
        if truth is None and "ground_truth" in columns:
            truth = columns["ground_truth"][row]
        extra = columns["extra_info"][row] if "extra_info" in columns else None
        messages = columns["raw_prompt"][row] if self._reads_prompts and "raw_prompt" in columns else None
        return Sample(source, text, truth, dict(extra or {}), messages)

    def _report(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        """Log failures with one example, `num_examine` samples, and, in the first call, why all scores are 0."""
        failed = sum(score.error is not None for score in scores)
        self.last_failure = None
        if failed:
            message = self.last_failure = describe_failures(samples, scores, self.on_error)
            if self.on_error == "fail":
                raise RewardError(message)
            logger.warning("%s", message)
        logged: Counter[str] = Counter()
        for sample, score in zip(samples, scores, strict=True):
            logged[sample.data_source] += 1
            if logged[sample.data_source] <= self.num_examine:
                logger.info("score %g %s\n%s", score.value, score.extra or "", describe_sample(sample))
        if self._first_call and scores and failed < len(scores) and not any(score.value for score in scores):
            logger.warning(
                "%s", explain_zero_scores(samples, is_user_function=self.compute_score is not default_compute_score)
            )
        self._first_call = False


# Methods that must not be overridden if responses are scored as they finish.
_SINGLE_SCORING = ("__call__", "samples", "score", "submit")


def _response_tokens(data: DataProto) -> list[np.ndarray]:
    """The token ids of each response, without padding. (Tokenizers decode arrays faster than lists.)"""
    lengths = response_lengths(data).tolist()
    return [row[:length] for row, length in zip(data.batch["responses"].cpu().numpy(), lengths, strict=True)]


def response_lengths(data: DataProto) -> torch.Tensor:
    """[batch]: number of tokens of each response, including those of tools and environments."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :].sum(-1).long()


def _reward_tensor(data: DataProto, scores: Sequence[Score]) -> torch.Tensor:
    """[batch, response]: each score on the last token that the model sampled; rows without one are 0."""
    width = data.batch["responses"].shape[1]
    mask = (data.batch["response_mask"] if "response_mask" in data.batch else data.batch["attention_mask"])[:, -width:]
    return at_last_token(torch.tensor([score.value for score in scores], dtype=torch.float32), mask)


def _extra_columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for score in scores for name in score.extra)
    columns: dict[str, list[Any]] = {name: [score.extra.get(name) for score in scores] for name in names}
    columns[FAILED_COLUMN] = [float(score.error is not None) for score in scores]
    columns[ERROR_COLUMN] = [score.kind for score in scores]
    return columns


def describe_sample(sample: Sample) -> str:
    """Data source, response (its end, which has the answer) and ground truth, one per line."""
    text = sample.solution_str
    excerpt = text if len(text) <= _LOGGED_CHARACTERS else "…" + text[-_LOGGED_CHARACTERS:]
    truth = str(sample.ground_truth)[:200]
    return f"  data_source: {sample.data_source}\n  answer: {excerpt!r}\n  ground_truth: {truth!r}"


def describe_failures(samples: Sequence[Sample], scores: Sequence[Score], on_error: str) -> str:
    """The number of samples that could not be scored, by kind of error, the consequence, and the first of them."""
    failed = [row for row, score in enumerate(scores) if score.error is not None]
    kinds = Counter(str(scores[row].kind) for row in failed)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    first = failed[0]
    return (
        f"reward: {len(failed)} of {len(scores)} samples could not be scored: {counts} (reward_model.on_error="
        f"{on_error}: {POLICIES[on_error]}). The first, row {first}: {scores[first].error}\n"
        f"{describe_sample(samples[first])}"
    )


def explain_zero_scores(samples: Sequence[Sample], is_user_function: bool) -> str:
    """A message that all scores are 0, the likely cause (no answer was found in the texts, or the answers are wrong),
    and one sample."""
    if is_user_function:
        cause = "they come from custom_reward_function; try it with the sample below"
    else:
        extractors = [score_function(sample.data_source).extract for sample in samples]
        extracted = [
            extract is not None and extract(sample.solution_str) is not None
            for sample, extract in zip(samples, extractors, strict=True)
        ]
        if not any(extractors):
            cause = "the answers are wrong, or not in the format that the reward function expects"
        elif not any(extracted):
            cause = "no text has an answer in the expected format, which the prompt must request"
        else:
            cause = f"{sum(extracted)} texts have an answer, and all are wrong: the task may be too hard for the model"
    return f"reward: all {len(samples)} scores are 0: {cause}. One sample:\n{describe_sample(samples[0])}"
