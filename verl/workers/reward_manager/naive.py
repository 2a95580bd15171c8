"""NaiveRewardManager: one call of the reward function per answer, its score on the answer's last token.

The other managers are this one with a step replaced: how answers become scores (`score`), or what becomes of the scores
(`shaped`).
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

from verl.protocol import DataProto
from verl.utils.progress import count_futures
from verl.utils.resources import available_cores
from verl.utils.reward_score import default_compute_score, score_function
from verl.utils.reward_score.registry import UNKNOWN_SOURCE
from verl.workers.reward_manager.scorer import Sample, Score, ScorerPool

logger = logging.getLogger(__name__)

# Columns that every manager adds: 1.0 where a row could not be scored, and the kind of error there.
FAILED, ERROR = "scoring_failed", "scoring_error"
_MOST_PROCESSES = 16
# `reward_model.on_error`
POLICIES = {"fail": "the run stops", "zero": "they score 0", "mask": "they score 0 and are not trained on"}

_SHOWN_CHARACTERS = 600
# Where rows remember their place in the generation request, whatever becomes of the batch in between.
ROW = "row"
Finished = Sequence[tuple[int, np.ndarray]]
"""(row of the batch, token ids of its answer)."""


class RewardError(RuntimeError):
    """A sample could not be scored, and `reward_model.on_error` is `fail`."""


class ScoresAhead:
    """Answers scored as they are finished, while others of their batch are still being generated.

    `describe` makes samples of answers. A score is found again by the row whose answer it is, never by what the
    answer says: two rows may say the same and deserve different scores.
    """

    def __init__(self, describe: Callable[[Finished], list[Sample]], submit: Callable[[Sample], Future[Score]]) -> None:
        self._describe, self._submit = describe, submit
        self._found: dict[int, tuple[np.ndarray, Sample, Future[Score]]] = {}
        self.submitted = 0

    def add(self, finished: Finished) -> None:
        """Score these answers as soon as there is a free scorer."""
        if not finished:
            return
        for (row, tokens), sample in zip(finished, self._describe(finished), strict=True):
            self._found[row] = tokens, sample, self._submit(sample)
        self.submitted += len(finished)

    def take(self, row: int, tokens: Any) -> tuple[Sample, Future[Score]] | None:
        """The row's sample and its score to come, if it was added and these are still the tokens of its answer."""
        found = self._found.pop(row, None)
        if found is None or not np.array_equal(found[0], tokens):
            return None
        return found[1], found[2]

    @classmethod
    def joined(cls, parts: Sequence[ScoresAhead], size: int) -> ScoresAhead:
        """One of them all, in which the rows of each, `size` of them, come after those of the one before."""
        whole = cls(parts[0]._describe, parts[0]._submit)
        for number, part in enumerate(parts):
            whole._found |= {number * size + row: found for row, found in part._found.items()}
        whole.submitted = len(whole._found)
        return whole


class NaiveRewardManager:
    """Scores every answer with `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    The function runs in scorer processes (`num_processes`; 0: here, without limits), each call for at most `timeout`
    seconds, each process with at most `memory_limit_gb` beyond what is loaded (None: no limit). A call that raises,
    hangs, dies or returns no finite number costs its own sample: `on_error` says whether the run stops (`fail`), the
    sample scores 0 (`zero`), or is also taken out of training (`mask`, done by
    `verl.trainer.ppo.reward.compute_reward`). `num_examine` samples per data source are logged in every call.
    `skip_special_tokens=False` keeps special tokens in the text that the function reads.
    """

    # Parameters of a user's function: those it must have, and those it is given if it has them.
    required_arguments: tuple[str, ...] = ("solution_str", "ground_truth")
    optional_arguments: tuple[str, ...] = ("data_source", "extra_info", "raw_prompt")
    # Whether it gets lists of answers, and of how many (None: all that there are).
    takes_lists = False
    batch_size: int | None = 1

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
                raise ValueError(f"reward_model.reward_kwargs.{name}: {limit} leaves nothing. Set it above 0.")
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.on_error = on_error
        self.skip_special_tokens = skip_special_tokens
        self.last_failure: str | None = None  # of the last call: what could not be scored, in words
        processes = min(_MOST_PROCESSES, available_cores()) if num_processes is None else num_processes
        memory_limit = None if memory_limit_gb is None else int(memory_limit_gb * 2**30)
        self._pool = ScorerPool(self.compute_score, processes, timeout, memory_limit, self.takes_lists, self.batch_size)
        self._in_processes = processes > 0
        self._reads_prompts = not {"raw_prompt", "raw_prompts"}.isdisjoint(
            inspect.signature(self.compute_score).parameters
        )
        self._ahead: ScoresAhead | None = None
        self._first_call = True

    def submit(self, sample: Sample) -> Future[Score]:
        """The primitive: score one answer in a scorer process. A failed call is a Score with an `error`."""
        return self._pool.submit(sample)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score answers, in order."""
        return self._pool.score(samples)

    def shaped(self, data: DataProto, scores: Sequence[Score]) -> Sequence[Score]:
        """What the rows get for these scores: here, just them."""
        return scores

    @overload
    def __call__(self, data: DataProto, return_dict: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def __call__(self, data: DataProto, return_dict: Literal[True]) -> dict[str, Any]: ...
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """[batch, response] scores, each on the last token the model sampled and 0 elsewhere.

        With `return_dict`: `reward_tensor`, and `reward_extra_info` with a list of one value per row for every field
        that the function returned (None where it did not), `scoring_failed` (1.0 where there is no score) and
        `scoring_error` (what kind of error, or None). A batch with `rm_scores` was scored by a reward model; those are
        the result.
        """
        if "rm_scores" in data.batch:
            reward, extra = data.batch["rm_scores"], {}
        else:
            samples, plain = self._scored(data)
            self._report(samples, plain)
            scores = self.shaped(data, plain)
            reward, extra = _place(data, scores), _columns(scores)
        return {"reward_tensor": reward, "reward_extra_info": extra} if return_dict else reward

    def samples(self, data: DataProto) -> list[Sample]:
        """What the reward function is told of each row; text is decoded from the tokens that are there, no padding."""
        return self._samples(data.non_tensor_batch, list(enumerate(_answer_tokens(data))))

    def score_ahead(self, columns: Mapping[str, Any]) -> ScoresAhead | None:
        """Where answers to rows with these columns can be scored as they are finished; the next call finds them there,
        by its column `row`: the place of each row in `columns`.

        None where answers are not scored one by one in processes, or a subclass does it in its own way.
        """
        own = [name for name in _ONE_BY_ONE if getattr(type(self), name) is not getattr(NaiveRewardManager, name)]
        self._ahead = None
        named = self.reward_fn_key in columns or self.compute_score is not default_compute_score
        if not (own or self.takes_lists) and self._in_processes and named:
            self._ahead = ScoresAhead(functools.partial(self._samples, columns), self.submit)
        return self._ahead

    def use_ahead(self, parts: Sequence[ScoresAhead], size: int) -> int:
        """The next call finds its scores in these, each of which is of `size` rows; how many there are."""
        self._ahead = ScoresAhead.joined(parts, size)
        return self._ahead.submitted

    @property
    def scored_again(self) -> int:
        """Samples that lost their scorer to somebody else and were scored by another, so far."""
        return self._pool.scored_again

    def bind(self, **arguments: Any) -> None:
        """From now on the reward function gets these, too, as far as it has such parameters."""
        known = inspect.signature(self.compute_score).parameters
        given = {name: value for name, value in arguments.items() if name in known}
        if given:
            self.compute_score = functools.partial(self.compute_score, **given)
            self._pool = self._pool.of(self.compute_score)

    def close(self) -> None:
        """End the scorer processes. The next call starts new ones."""
        self._pool.close()

    def _scored(self, data: DataProto) -> tuple[list[Sample], list[Score]]:
        """The rows' samples and scores; what was scored ahead is only waited for."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ROW not in data.non_tensor_batch:
            samples = self.samples(data)
            return samples, self.score(samples)
        rows = data.non_tensor_batch[ROW]
        known = [ahead.take(int(row), tokens) for row, tokens in zip(rows, _answer_tokens(data), strict=True)]
        early = count_futures([found[1] for found in known if found is not None], len(known) - known.count(None))
        late = [row for row, found in enumerate(known) if found is None]
        late_samples = self.samples(data.select_idxs(late)) if late else []
        rest = iter(zip(late_samples, self.score(late_samples), strict=True))
        values = iter([future.result() for future in early])
        pairs = [next(rest) if found is None else (found[0], next(values)) for found in known]
        return [sample for sample, _ in pairs], [score for _, score in pairs]

    def _samples(self, columns: Mapping[str, Any], answers: Finished) -> list[Sample]:
        tokens = [each for _, each in answers]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=self.skip_special_tokens)
        return [self._sample(columns, row, text) for (row, _), text in zip(answers, texts, strict=True)]

    def _sample(self, columns: Mapping[str, Any], row: int, text: str) -> Sample:
        if self.reward_fn_key not in columns and self.compute_score is default_compute_score:
            raise ValueError(
                f"data.reward_fn_key: the batch has no {self.reward_fn_key!r}. Set it to the column that says which "
                f"reward function scores a row. Columns: {', '.join(columns)}."
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
        """Log failures with one example, a few samples, and at the first call why all scores are 0, if they are."""
        failed = sum(score.error is not None for score in scores)
        self.last_failure = None
        if failed:
            message = self.last_failure = describe_failures(samples, scores, self.on_error)
            if self.on_error == "fail":
                raise RewardError(message)
            logger.warning("%s", message)
        shown: Counter[str] = Counter()
        for sample, score in zip(samples, scores, strict=True):
            shown[sample.data_source] += 1
            if shown[sample.data_source] <= self.num_examine:
                logger.info("score %g %s\n%s", score.value, score.extra or "", describe_sample(sample))
        if self._first_call and scores and failed < len(scores) and not any(score.value for score in scores):
            logger.warning("%s", why_all_zero(samples, own_function=self.compute_score is not default_compute_score))
        self._first_call = False


# What answers go through, one by one, on the way to their scores.
_ONE_BY_ONE = ("__call__", "samples", "score", "submit")


def _answer_tokens(data: DataProto) -> list[np.ndarray]:
    """The token ids of each row's answer, without padding. (A tokenizer reads arrays faster than lists.)"""
    lengths = response_lengths(data).tolist()
    return [row[:length] for row, length in zip(data.batch["responses"].cpu().numpy(), lengths, strict=True)]


def response_lengths(data: DataProto) -> torch.Tensor:
    """[batch] tokens of each response, those of tools and environments included."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :].sum(-1).long()


def _place(data: DataProto, scores: Sequence[Score]) -> torch.Tensor:
    """[batch, response]: each score on the last token that the model sampled; a row without any gets nothing."""
    responses = data.batch["responses"]
    width = responses.shape[1]
    mask = (data.batch["response_mask"] if "response_mask" in data.batch else data.batch["attention_mask"])[:, -width:]
    reward = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
    positions = torch.arange(1, width + 1, device=responses.device)
    last = (mask.bool() * positions).amax(-1) - 1 if width else mask.new_full((len(scores),), -1)
    rows = torch.nonzero(last >= 0).squeeze(-1)
    values = torch.tensor([score.value for score in scores], dtype=torch.float32, device=responses.device)
    reward[rows, last[rows]] = values[rows]
    return reward


def _columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for score in scores for name in score.extra)
    columns: dict[str, list[Any]] = {name: [score.extra.get(name) for score in scores] for name in names}
    columns[FAILED] = [float(score.error is not None) for score in scores]
    columns[ERROR] = [score.kind for score in scores]
    return columns


def describe_sample(sample: Sample) -> str:
    """Data source, answer (its end, where the result stands) and ground truth, on lines of their own."""
    text = sample.solution_str
    shown = text if len(text) <= _SHOWN_CHARACTERS else "…" + text[-_SHOWN_CHARACTERS:]
    return (
        f"  data_source: {sample.data_source}\n  answer: {shown!r}\n  ground_truth: {str(sample.ground_truth)[:200]!r}"
    )


def describe_failures(samples: Sequence[Sample], scores: Sequence[Score], on_error: str) -> str:
    """How many samples of a batch could not be scored, by kind, what becomes of them, and the first of them."""
    failed = [row for row, score in enumerate(scores) if score.error is not None]
    kinds = Counter(str(scores[row].kind) for row in failed)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    first = failed[0]
    return (
        f"reward: {len(failed)} of {len(scores)} samples could not be scored: {counts} (reward_model.on_error="
        f"{on_error}: {POLICIES[on_error]}). The first, row {first}: {scores[first].error}\n"
        f"{describe_sample(samples[first])}"
    )


def why_all_zero(samples: Sequence[Sample], own_function: bool) -> str:
    """Whether the answers could not be read, or were read and are wrong; with one sample."""
    if own_function:
        cause = "they come from custom_reward_function; try it on the sample below"
    else:
        extractors = [score_function(sample.data_source).extract for sample in samples]
        read = [
            extract is not None and extract(sample.solution_str) is not None
            for sample, extract in zip(samples, extractors, strict=True)
        ]
        if not any(extractors):
            cause = "the answers are wrong, or not in the format the reward function looks for"
        elif not any(read):
            cause = "no answer was found in any text: the model does not use the format that the prompt must ask for"
        else:
            cause = (
                f"answers were found in {sum(read)} texts, and all are wrong: the task may be too hard for the model"
            )
    return f"reward: all {len(samples)} scores are 0: {cause}. One sample:\n{describe_sample(samples[0])}"
