"""Progress output of a run: the finished samples of every phase, and the lines on the console."""

from __future__ import annotations

import logging

from tests.support.training_harness import close, make_task, make_trainer, overrides
from verl.utils.progress import Progress


def test_every_phase_counts_its_samples_and_the_console_says_what_users_know(tmp_path, monkeypatch, caplog):
    """PPO with a critic and a reference, two epochs, in this process: asked for the standing at every tick."""
    task = make_task(tmp_path)
    run = overrides(
        task,
        tmp_path,
        "trainer.total_training_steps=1",
        "trainer.val_before_train=True",
        "reward_model.reward_kwargs={num_processes: 0}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "critic.ppo_epochs=3",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "critic.forward_micro_batch_size_per_gpu=4",
    )
    trainer = make_trainer(run)
    progress: dict[str, list[tuple[int, int]]] = {}
    tick = Progress.tick

    def tick_and_look(self: Progress, units: int = 1) -> None:
        tick(self, units)
        now = trainer.status.snapshot()
        progress.setdefault(now.phase, []).append((now.done, now.units))

    monkeypatch.setattr(Progress, "tick", tick_and_look)
    caplog.set_level(logging.INFO, logger="verl")
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        close(trainer)

    assert progress["old_log_prob"][-1] == (8, 8)
    assert progress["ref"][-1] == (8, 8)
    assert progress["compute_values"] == [(4, 8), (8, 8)]
    assert progress["train_critic"] == [(i, 24) for i in range(1, 25)]
    assert progress["train_actor"] == [(i, 16) for i in range(2, 17, 2)]
    assert progress["reward"][-1] == (8, 8)
    assert progress["validation reward"][-1] == (6, 6)
    # Responses that finish within some milliseconds are reported, and counted, together.
    for phase, rows in (("rollout", 8), ("validation rollout", 6)):
        assert progress[phase][-1] == (rows, rows)
        assert progress[phase] == sorted(progress[phase])
        assert {units for _, units in progress[phase]} == {rows}
    for line in (
        "Creating Actor worker pool...",
        "Creating Rollout worker pool...",
        "Creating Critic worker pool...",
        "toy Correct: 0/6, Accuracy: 0.00",
        "step 1: toy Correct: 0/8, Accuracy: 0.00",
        "Starting training...",
        "Epoch 1/15",
        f"saved to {tmp_path}/checkpoints/global_step_1",
    ):
        assert line in caplog.messages
