"""One greedy answer per prompt whose score is the baseline of the sampled ones (ReMax, arXiv 2310.10505)."""

from __future__ import annotations

import numpy as np
import torch

from verl.protocol import DataProto, object_array

# A column of the generation request: False where a row is to be answered greedily.
SAMPLED = "do_sample"


def answer_rows(prompts: DataProto, n: int, greedy: bool) -> DataProto:
    """Each prompt `n` times, all its rows together and numbered by `sample_index`; with `greedy` once more, last."""
    copies = n + greedy
    rows = prompts.repeat(copies, interleave=True)
    numbers = np.arange(len(rows)) % copies
    rows.non_tensor_batch["sample_index"] = object_array(numbers.tolist())
    if greedy:
        rows.non_tensor_batch[SAMPLED] = object_array((numbers < n).tolist())
    return rows


def split_off_baselines(batch: DataProto) -> DataProto:
    """The sampled rows of a scored batch; `reward_baselines` [batch] is the score of their prompt's greedy answer.

    A greedy answer that could not be scored counts 0: any baseline that the samples do not influence is right, only not
    equally good.
    """
    sampled = np.array(batch.pop(non_tensor_batch_keys=[SAMPLED]).non_tensor_batch[SAMPLED], dtype=bool)
    uids = np.asarray(batch.non_tensor_batch["uid"])
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    greedy_score = {uids[row]: scores[row] for row in np.flatnonzero(~sampled)}
    kept = batch.select_idxs(sampled)
    kept.batch["reward_baselines"] = torch.tensor([greedy_score[uid] for uid in uids[sampled]])
    return kept
