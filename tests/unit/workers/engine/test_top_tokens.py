"""A loss over a teacher's likeliest tokens: what the engine gives for it, however rows are cut and packed."""

from __future__ import annotations

import torch

from tests.support.engine_cases import assert_close, engine_gradients, make_batch, make_engine
from tests.support.tiny import tiny_model
from verl.config import ActorConfig, as_config
from verl.config.ppo import DistillationLossConfig
from verl.workers.engine.base import MicroBatching
from verl.workers.roles.policy_loss import PolicyLoss

LOSS = DistillationLossConfig(
    loss_mode="reverse_kl_topk", topk=5, distillation_loss_coef=1.0, use_task_rewards=False, as_reward=False
)


def taught_batch():
    """A batch with the likeliest tokens of another, larger model."""
    data = make_batch(rows=7)
    teacher = make_engine(tiny_model(seed=3, hidden_size=96, initializer_range=0.1), train=False)
    found = teacher.infer(data, ["log_probs"], 0.7, MicroBatching(size=3), top_k=5).batch
    data.batch["old_log_probs"] = data.batch["teacher_log_prob"] = found["log_probs"]
    data.batch["teacher_top_ids"], data.batch["teacher_top_log_probs"] = found["top_ids"], found["top_log_probs"]
    return data


def test_the_likeliest_tokens_are_those_of_the_whole_distribution():
    data = taught_batch()
    model = tiny_model(seed=3, hidden_size=96, initializer_range=0.1)
    mask = data.batch["attention_mask"].bool()
    for row in range(len(data)):
        ids, length = data.batch["input_ids"][row][mask[row]], int(mask[row, -9:].sum())
        with torch.no_grad():
            log_p = (model(input_ids=ids[None]).logits[0, -length - 1 : -1] / 0.7).log_softmax(-1)
        found = data.batch["teacher_top_log_probs"][row, :length]
        torch.testing.assert_close(found, log_p.topk(5).values, rtol=1e-4, atol=1e-4)
        at_ids = log_p.gather(1, data.batch["teacher_top_ids"][row, :length].long())
        torch.testing.assert_close(found, at_ids, rtol=1e-4, atol=1e-4)
        assert not data.batch["teacher_top_log_probs"][row, length:].any()


def test_loss_and_gradient_do_not_depend_on_packing_padding_or_micro_batches():
    data, found = taught_batch(), []
    wide = make_batch(rows=7, extra_prompt=6)
    for name in ("old_log_probs", "teacher_log_prob", "teacher_top_ids", "teacher_top_log_probs"):
        wide.batch[name] = data.batch[name]
    for batch, packed, micro in (
        (data, True, MicroBatching()),
        (data, False, MicroBatching(size=2)),
        (data, True, MicroBatching(max_tokens=20)),
        (wide, False, MicroBatching(size=7)),
    ):
        engine = make_engine(tiny_model(), use_remove_padding=packed)
        loss = PolicyLoss(as_config(ActorConfig, {}), distillation=LOSS)
        metrics = engine.forward_backward(batch, loss, loss.outputs, 0.7, micro)
        assert metrics["distillation_loss"][0] > 0.05
        found.append({"loss": torch.tensor(metrics["loss"][0]), **engine_gradients(engine)})
    for other in found[1:]:
        assert_close(found[0], other)
    assert found[0]["lm_head.weight"].abs().max() > 1e-3
