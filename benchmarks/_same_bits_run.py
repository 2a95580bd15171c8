"""Run the cases of `same_bits.py` with the `verl` that is first on PYTHONPATH, and store their metrics and digests.

`same_bits.py` starts it in a separate process per source tree. It uses only public or stable names of `verl`: a commit
that changes one of them must keep this file working with earlier commits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _same_bits_cases import SAVED_STEP, STEPS, Case, cases, ppo_overrides, supervised_overrides

# Metrics that depend on time or on the load of the machine.
TIMED = re.compile(
    r"^(timing|perf/|checkpoint/|time|memory|training/hang|async/(wait|idle|overlap)|reward/scored_while_generating"
    r"|(trainer|rollouter)/idle|agent_loop/(generate_sequences|tool_calls|compute_score|slowest))|seconds|_s$|_s/|tokens_per"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume-from", type=Path, help="results of another tree: resume from its checkpoints")
    parser.add_argument("--cases", nargs="*", help="names; default: all")
    options = parser.parse_args()
    task = json.loads((options.task / "task.json").read_text())
    for case in cases(task):
        if options.cases and case.name not in options.cases:
            continue
        folder = options.out / case.name
        result = folder / ("resumed.json" if options.resume_from else "run.json")
        if not result.exists():
            folder.mkdir(parents=True, exist_ok=True)
            result.write_text(json.dumps(run_case(case, task, folder, options.resume_from), indent=1))


def run_case(case: Case, task: dict[str, str], folder: Path, resume_from: Path | None) -> dict[str, Any]:
    """Run one case, from scratch or from the saved step of another tree's run of it."""
    steps = folder / ("resumed" if resume_from else "steps")
    shutil.rmtree(steps, ignore_errors=True)
    if resume_from is not None:
        source = resume_from / case.name / "steps"
        shutil.copytree(source / f"global_step_{SAVED_STEP}", steps / f"global_step_{SAVED_STEP}")
        (steps / "latest_checkpointed_iteration.txt").write_text(str(SAVED_STEP))
    recorded: dict[str, Any] = {"metrics": {}, "columns": {}}
    try:
        with working_directory(folder):
            if case.program == "ppo":
                run_ppo_case(case, task, steps, recorded)
            else:
                run_supervised_case(case, task, steps, recorded)
        recorded["weights"] = exported_weights(steps / f"global_step_{STEPS}")
    except Exception:
        logging.exception("case %s failed", case.name)
        recorded["error"] = traceback.format_exc(limit=-3)
    return recorded


def run_ppo_case(case: Case, task: dict[str, str], steps: Path, recorded: dict[str, Any]) -> None:
    from verl.config import load_config
    from verl.single_controller.local import LocalWorkerGroup
    from verl.single_controller.ray import RayWorkerGroup
    from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils import hf_tokenizer

    unshared = without_shared_prefixes("actor_rollout_ref.actor.")
    config = load_config(None, [*ppo_overrides(task, steps, *case.overrides), *unshared])
    runner = TaskRunner()
    for role in ("actor_rollout", "critic", "reward_model", "ref_policy", "teacher"):
        getattr(runner, f"add_{role}_worker")(config)
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    train = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    reward = load_reward_manager(config, tokenizer, num_examine=0)
    trainer = recording(runner._trainer_class(config), recorded)(
        config,
        tokenizer,
        runner.role_worker_mapping,
        runner.init_resource_pool_mgr(config),
        ray_worker_group_cls=RayWorkerGroup if case.ranks > 1 else LocalWorkerGroup,
        reward_fn=reward,
        val_reward_fn=reward,
        train_dataset=train,
        val_dataset=create_rl_dataset(config.data.val_files, config.data, tokenizer, None, is_train=False),
        train_sampler=create_rl_sampler(config.data, train),
        device_name="cpu",
    )
    try:
        with ray_cluster(case.ranks):
            trainer.init_workers()
            trainer.fit()
    finally:
        reward.close()
        trainer.resource_pool_manager.release()


def without_shared_prefixes(block: str) -> list[str]:
    """Overrides that disable shared prefixes, so that sums have the same order as in earlier commits; [] if the tree
    does not have the key."""
    import verl

    files = (Path(verl.__file__).parent / "trainer" / "config").rglob("*.yaml")
    known = any("use_prefix_grouper" in file.read_text(encoding="utf-8") for file in files)
    return [f"{block}use_prefix_grouper=False"] if known else []


def recording(trainer_class: type, recorded: dict[str, Any]) -> type:
    """A trainer that stores its metrics and, before each update, the digest of every column of the batch."""

    class Recording(trainer_class):  # type: ignore[misc, valid-type]
        def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
            super()._log_metrics(metrics, step)
            recorded["metrics"].setdefault(str(step), {}).update(exact_metrics(metrics))

        def _compute_advantage(self, batch: Any, metrics: dict[str, float] | None = None) -> Any:
            batch = super()._compute_advantage(batch, metrics)
            recorded["columns"][str(self.global_steps)] = {
                name: digest(without_prompt_padding(name, batch)) for name in batch.batch.keys()
            }
            return batch

    return Recording


def run_supervised_case(case: Case, task: dict[str, str], steps: Path, recorded: dict[str, Any]) -> None:
    from verl.config import RMConfig, SFTConfig, load_config
    from verl.trainer.main_rm import run_rm
    from verl.trainer.main_sft import run_sft

    root, run = {"sft": (SFTConfig, run_sft), "rm": (RMConfig, run_rm)}[case.program]
    shutil.rmtree("runs", ignore_errors=True)
    overrides = [*supervised_overrides(task, steps, case.program), *without_shared_prefixes("")]
    run(load_config(None, overrides, root=root))
    for line in next(Path.cwd().glob("runs/**/metrics.jsonl")).read_text().splitlines():
        record = json.loads(line)
        recorded["metrics"].setdefault(str(record["step"]), {}).update(exact_metrics(record["data"]))


def exact_metrics(metrics: dict[str, Any]) -> dict[str, str]:
    """Values as hexadecimal floats; without those that depend on the clock."""
    return {name: float(value).hex() for name, value in metrics.items() if not TIMED.search(name)}


def exported_weights(step: Path) -> dict[str, str]:
    """Digest of every tensor of the Hugging Face exports of a checkpoint."""
    from safetensors import safe_open

    digests = {}
    for file in sorted(step.rglob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                digests[f"{file.parent.relative_to(step)}/{name}"] = digest(tensors.get_tensor(name))
    if not digests:
        raise FileNotFoundError(f"{step} has no *.safetensors")
    return digests


def without_prompt_padding(name: str, batch: Any) -> Any:
    """A column without the padding that all prompts have: the width of the padding is not a result."""
    mask, value = batch.batch["attention_mask"], batch.batch[name]
    prompt_width = mask.shape[1] - batch.batch["responses"].shape[1]
    has_prompt = value.ndim > 1 and value.shape[1] in (mask.shape[1], prompt_width) and name != "responses"
    padding = int((mask[:, :prompt_width].sum(0) == 0).sum())
    return value[:, padding:] if has_prompt and value.shape[1] != batch.batch["responses"].shape[1] else value


def digest(tensor: Any) -> str:
    import torch

    data = tensor.detach().cpu().contiguous()
    header = f"{data.dtype} {tuple(data.shape)} "
    raw = data.reshape(-1).view(torch.uint8) if data.numel() else data.reshape(-1)
    return hashlib.sha256(header.encode() + raw.numpy().tobytes()).hexdigest()[:16]


@contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    """Run in `folder`, so that files with relative paths are written there."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def ray_cluster(ranks: int) -> Iterator[None]:
    """A local Ray node for runs with several ranks."""
    if ranks == 1:
        yield
        return
    import ray

    ray.init(address="local", num_cpus=ranks, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
