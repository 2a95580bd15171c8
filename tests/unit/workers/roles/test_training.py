"""Metrics of an update: what ranks measured on their own tokens becomes what one rank with all of them measures."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from verl.config import ActorConfig, CriticConfig, as_config
from verl.protocol import DataProto, object_array
from verl.utils.metric import reduce_metrics
from verl.workers.engine.base import ALL_ROWS, Counts, Metrics
from verl.workers.engine.common.groups import ensure_process_group
from verl.workers.engine.common.micro_batches import MetricSums, local_counts
from verl.workers.engine.common.optim import step_metrics
from verl.workers.roles.critic import ValueLoss
from verl.workers.roles.policy_loss import PolicyLoss
from verl.workers.roles.training import mini_batches_of_prompts, run_epochs


class Rank:
    """One rank of an engine whose model gives what the rows say; a micro-batch for every row."""

    def __init__(self, dp_size: int, counts: Counts) -> None:
        self.dp_size, self._counts = dp_size, counts

    def forward_backward(self, data: DataProto, loss_fn: Any, outputs: Any, **_: Any) -> Metrics:
        sums = MetricSums()
        for row in data.split(1):
            _, metrics = loss_fn({name: row.batch[f"new_{name}"] for name in outputs}, row, self._counts)
            for name, (total, count) in metrics.items():
                sums.add(name, total, count)
        return sums.result()

    def optimizer_step(self) -> dict[str, float]:
        return step_metrics(grad_norm=1.0, lr=1e-3, reason=None)

    def weights_finite(self, thorough: bool) -> bool:
        return True


def measured(parts: list[DataProto], whole: DataProto, loss: Any, outputs: list[str]) -> dict[str, float]:
    """The metrics of one optimizer step on `whole`, each of the parts on a rank of its own."""
    totals: dict[str, list] = {}
    for part in parts:
        rank: Any = Rank(len(parts), local_counts(whole))
        result = run_epochs(rank, part, loss, outputs, 1.0, ALL_ROWS, mini_batches=1, epochs=1, prefix="role")
        for name, pairs in result.meta_info["metrics"].items():
            totals.setdefault(name, []).extend(pairs)
    return reduce_metrics(totals)


@pytest.mark.parametrize("lengths", [[4, 3, 1, 2], [4, 3, 0, 0], [0, 4, 0, 1]], ids=["both", "one", "rows"])
@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (PolicyLoss(as_config(ActorConfig, {"entropy_coeff": 0.01, "use_kl_loss": True})), ["log_probs", "entropy"]),
        (ValueLoss(as_config(CriticConfig, {})), ["values"]),
    ],
    ids=["actor", "critic"],
)
def test_two_ranks_report_what_one_does_also_where_one_has_no_tokens(loss, outputs, lengths):
    torch.manual_seed(0)
    names = ["old_log_probs", "new_log_probs", "ref_log_prob", "new_entropy", "advantages", "values", "new_values"]
    columns = {name: torch.randn(4, 4) for name in [*names, "returns"]}
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    whole = DataProto.from_dict(columns | {"response_mask": mask})
    one, two = (measured(parts, whole, loss, outputs) for parts in ([whole], whole.split(2)))
    assert set(one) == set(two)
    assert two == pytest.approx(one)
    assert any(value for name, value in one.items() if "clipfrac" in name)


def test_mini_batches_may_have_different_numbers_of_rows():
    sizes: list[int] = []

    class Counting(Rank):
        def forward_backward(self, data: DataProto, loss_fn: Any, outputs: Any, **_: Any) -> Metrics:
            sizes.append(len(data))
            return {}

    rank: Any = Counting(1, Counts(1.0, 1.0))
    data = DataProto.from_dict({"response_mask": torch.ones(6, 2)})
    run_epochs(rank, data, None, [], 1.0, ALL_ROWS, mini_batches=[1, 3, 2], epochs=2, prefix="role")  # type: ignore[arg-type]
    assert sizes == [1, 3, 2, 1, 3, 2]
    for wrong in ([1, 3], [6, 0], 4, []):
        with pytest.raises(ValueError, match=rf"^mini-batches: 6 rows .* {re.escape(str(wrong))}\.$"):
            run_epochs(rank, data, None, [], 1.0, ALL_ROWS, mini_batches=wrong, epochs=1, prefix="role")  # type: ignore[arg-type]


def test_recompilations_of_all_mini_batches_are_added_up():
    class Compiling(Rank):
        def optimizer_step(self) -> dict[str, float]:
            return super().optimizer_step() | {"recompiles": 2.0}

    data = DataProto.from_dict({"response_mask": torch.ones(6, 2)})
    for cls, recompiles in ((Rank, None), (Compiling, [(6.0, 1.0)])):
        rank: Any = cls(1, Counts(1.0, 1.0))
        rank.forward_backward = lambda *_, **__: {}
        result = run_epochs(rank, data, None, [], 1.0, ALL_ROWS, mini_batches=3, epochs=1, prefix="actor")  # type: ignore[arg-type]
        assert result.meta_info["metrics"].get("perf/recompiles/actor") == recompiles


def test_a_batch_that_nobody_cut_is_cut_between_prompts():
    """Seven rows of four prompts, two prompts to a mini-batch; without their names, `n` rows are a prompt."""
    rank: Any = Rank(1, Counts(1.0, 1.0))
    rank.device = torch.device("cpu")
    ensure_process_group(rank.device)
    data = DataProto.from_dict({"response_mask": torch.ones(7, 2)})
    data.non_tensor_batch["uid"] = object_array(["a", "b", "b", "b", "c", "d", "d"])
    assert mini_batches_of_prompts(data, 2, 2, rank) == [4, 3]
    assert mini_batches_of_prompts(data, 8, 2, rank) == [7]
    data.pop(non_tensor_batch_keys=["uid"])
    assert mini_batches_of_prompts(data, 2, 2, rank) == [4, 3]
