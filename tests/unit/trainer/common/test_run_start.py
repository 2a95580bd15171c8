"""A checkpoint is compared with the run's models before any of them is loaded; what differs is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from tests.support.tiny import save_tiny_model, tiny_tokenizer
from tests.support.training_harness import make_task, make_trainer, overrides, run_training
from verl.config import ConfigError, RMConfig, SFTConfig, load_config
from verl.config.problems import Problem
from verl.trainer.common.run_start import run_parts
from verl.trainer.ppo.state import check_run_start
from verl.trainer.supervised.rm import RMTrainer
from verl.trainer.supervised.sft import SFTTrainer
from verl.workers.engine.common import checkpoint_compatibility
from verl.workers.engine.common.checkpoint_compatibility import weight_differences, weight_digests

LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj,v_proj]")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The task's model with something changed, by name."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "shallow", num_hidden_layers=1)
    save_tiny_model(folder / "narrow", intermediate_size=96)
    save_tiny_model(folder / "fewer_heads", num_attention_heads=2, head_dim=32, num_key_value_heads=1)
    save_tiny_model(folder / "rope", rope_theta=5.0e5)
    save_tiny_model(folder / "same", max_position_embeddings=1024, attention_dropout=0.5)
    return folder


def arguments(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    return overrides(task, folder, "data.val_files=[]", "trainer.total_training_steps=1", *more)


@pytest.fixture(scope="module")
def saved(task, tmp_path_factory) -> Path:
    """A run of one step, with a critic."""
    folder = tmp_path_factory.mktemp("saved")
    run_training(arguments(task, folder))
    return folder


@pytest.fixture(scope="module")
def saved_lora(task, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved_lora")
    run_training(arguments(task, folder, *LORA, "algorithm.adv_estimator=grpo"))
    return folder


def problems(command: list[str]) -> list[Problem]:
    try:
        check_run_start(load_config(None, command), {})
    except ConfigError as error:
        return error.problems
    return []


def model_keys(path: Path) -> tuple[str, ...]:
    return (f"actor_rollout_ref.model.path={path}", f"critic.model.path={path}")


def test_another_number_of_layers_is_refused_for_actor_and_critic_before_anything_is_loaded(task, models, saved):
    command = arguments(task, saved, *model_keys(models / "shallow"), "trainer.total_training_steps=2")
    trainer = make_trainer(command)
    with pytest.raises(ConfigError) as caught:
        trainer.init_workers()
    assert not hasattr(trainer, "actor_wg")
    actor, critic = caught.value.problems
    assert (actor.key, critic.key) == ("actor_rollout_ref.model.path", "critic.model.path")
    assert "global_step_1/actor" in actor.why
    assert "num_hidden_layers is 1 in the model and 2 in the checkpoint" in actor.why
    assert "12 tensors only in the checkpoint: model.layers.1." in actor.why
    assert "and 8 more" in actor.why
    assert "12 tensors only in the checkpoint: model.layers.1." in critic.why


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "narrow",
            [
                "intermediate_size is 96 in the model and 128 in the checkpoint",
                "gate_proj.weight is [96, 64] in the model and [128, 64]",
            ],
        ),
        ("fewer_heads", ["num_attention_heads is 2 in the model and 4 in the checkpoint"]),
        ("rope", ["rope_theta is 500000.0 in the model and 10000"]),
    ],
)
def test_shapes_and_settings_that_change_what_weights_mean_are_refused(task, models, saved, model, said):
    actor, critic = problems(arguments(task, saved, *model_keys(models / model)))
    for text in said:
        assert text in actor.why
        assert text in critic.why


def test_what_does_not_change_the_model_is_not_refused(task, models, saved):
    """Its folder, its precision, dropout, the longest sequence, the number of ranks."""
    ranks = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.mixed_precision=fp32")
    assert problems(arguments(task, saved, *model_keys(models / "same"), *ranks)) == []


def test_moments_in_another_precision_are_converted_and_another_layout_is_refused(task, saved, tmp_path):
    """`optim.state_dtype` may change; a state that AdamW does not have may not be dropped."""
    assert problems(arguments(task, saved, "actor_rollout_ref.actor.optim.state_dtype=bf16")) == []
    momentum = {f"model.norm.weight/{key}": torch.zeros(64) for key in ("exp_avg", "momentum_buffer")}
    dcp.save(momentum, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    (part,) = run_parts(load_config(None, arguments(task, saved, "algorithm.adv_estimator=grpo")))
    (said,) = checkpoint_compatibility.checkpoint_differences(tmp_path, ["optimizer"], part.expected)
    assert said == "the optimizer state has momentum_buffer, which this optimizer does not have"


def test_what_was_not_saved_cannot_be_asked_for(task, tmp_path):
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]"
    command = arguments(task, tmp_path, "algorithm.adv_estimator=grpo", contents)
    run_training(command)
    (problem,) = problems(command)
    assert "not saved in it: optimizer (checkpoint.save_contents)" in problem.why
    assert "checkpoint.load_contents" in problem.fix


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("actor_rollout_ref.model.lora_rank=8",), "lora_rank is 8 in the model and 4 in the checkpoint"),
        (("actor_rollout_ref.model.lora_alpha=99",), "lora_alpha is 99 in the model and "),
        (
            ("actor_rollout_ref.model.target_modules=[q_proj]",),
            "target_modules is ['q_proj'] in the model and ['q_proj', 'v_proj'] in the checkpoint",
        ),
        (("actor_rollout_ref.model.lora_rank=0",), "lora_rank is 0 in the model and 4 in the checkpoint"),
    ],
)
def test_other_adapters_are_refused(task, saved_lora, change, said):
    command = arguments(task, saved_lora, "algorithm.adv_estimator=grpo", *LORA)
    assert problems(command) == []
    (problem,) = problems([*command, *change])
    assert said in problem.why


def test_a_checkpoint_of_before_model_json_is_compared_by_its_tensors(task, models, saved, monkeypatch):
    monkeypatch.setattr(checkpoint_compatibility, "stored_model_info", lambda folder: {})
    actor, _ = problems(arguments(task, saved, *model_keys(models / "shallow")))
    assert "num_hidden_layers" not in actor.why
    assert "12 tensors only in the checkpoint" in actor.why
    assert problems(arguments(task, saved)) == []


@pytest.fixture(scope="module")
def tuned(task, tmp_path_factory) -> Path:
    """The task's model after some training: the same architecture, other weights."""
    folder = tmp_path_factory.mktemp("tuned")
    model = AutoModelForCausalLM.from_pretrained(task["model"])
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1e-3 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [False, True])
def test_other_weights_of_the_same_architecture_are_refused(task, saved, saved_lora, tuned, lora):
    """The run would go on with the weights of the checkpoint or, with adapters, put these on another base."""
    if lora:
        command = arguments(task, saved_lora, "algorithm.adv_estimator=grpo", *LORA)
        (actor,) = problems([*command, f"actor_rollout_ref.model.path={tuned}"])
    else:
        actor, critic = problems(arguments(task, saved, *model_keys(tuned)))
        assert critic.key == "critic.model.path"
        assert "trained from another model" in critic.why
    assert actor.key == "actor_rollout_ref.model.path"
    assert re.search(r"trained from another model of this architecture \(2\d of 2\d tensors differ: ", actor.why)
    assert "trainer.default_local_dir" in actor.fix


def test_the_same_weights_in_other_files_and_another_precision_are_not_refused(task, saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(task["model"]).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert problems(arguments(task, saved, *model_keys(tmp_path))) == []
    assert weight_digests(tmp_path).keys() == weight_digests(task["model"]).keys()


def test_weights_in_pickled_files_are_told_apart_too(task, tmp_path):
    weights = AutoModelForCausalLM.from_pretrained(task["model"]).state_dict()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    digests = weight_digests(task["model"])
    assert weight_differences(digests, weight_digests(tmp_path)) == []
    weights["model.norm.weight"][-1] += 1.0
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (said,) = weight_differences(digests, weight_digests(tmp_path))
    assert f"1 of {len(digests)} tensors differ: model.norm.weight" in said


@pytest.mark.parametrize("without", ["step", "load_contents"])
def test_weights_are_not_compared_where_they_are_not_known_or_not_read(task, saved, tuned, monkeypatch, without):
    more: tuple[str, ...] = ()
    if without == "step":
        monkeypatch.setattr(checkpoint_compatibility, "read_digests", lambda step: {})
    else:
        blocks = ("actor_rollout_ref.actor", "critic")
        more = tuple(f"{block}.checkpoint.load_contents=[optimizer,extra]" for block in blocks)
    assert problems(arguments(task, saved, *model_keys(tuned), *more)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("root", "trainer_class"), [(SFTConfig, SFTTrainer), (RMConfig, RMTrainer)])
def test_supervised_runs_are_compared_too(task, models, tuned, tmp_path, root, trainer_class):
    rows = tmp_path / "rows.jsonl"
    row = {"response": "b", "chosen": "c", "rejected": "d"}
    rows.write_text("\n".join(json.dumps(row | {"prompt": prompt}) for prompt in "ab"))

    def config(model: str | Path, steps: int) -> Any:
        keys = [
            f"model.path={model}",
            f"data.train_files={rows}",
            "data.train_batch_size=2",
            "data.max_length=64",
            "data.dataloader_num_workers=0",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={steps}",
            "trainer.logger=[console]",
            f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        ]
        return load_config(None, keys, root=root)

    with trainer_class(config(task["model"], 1)) as trainer:
        trainer.start()
        trainer.fit()
    with pytest.raises(ConfigError, match=r"num_hidden_layers"):
        trainer_class(config(models / "shallow", 2))
    with pytest.raises(ConfigError, match=r"^.*\n1\. model\.path = .*tuned.*global_step_1 ") as caught:
        trainer_class(config(tuned, 2))
    assert [problem.key for problem in caught.value.problems] == ["model.path"]
    trainer_class(config(task["model"], 2)).close()


def test_an_engine_refuses_by_itself_what_does_not_fit(saved, models):
    """The second line of defence, for engines used without a trainer; nothing of the model has changed then."""
    from verl.config import FSDPConfig, ModelConfig, OptimConfig, as_config
    from verl.workers.engine.fsdp import FSDPEngine

    at = "actor_rollout_ref.actor"
    engine = FSDPEngine(
        str(models / "shallow"),
        model_config=as_config(ModelConfig, {"path": "given"}),
        engine_config=as_config(FSDPConfig, {}, at=f"{at}.fsdp_config"),
        optim=as_config(OptimConfig, {}, at=f"{at}.optim"),
    )
    before = {name: value.full_tensor().clone() for name, value in engine.model.hf.state_dict().items()}
    with pytest.raises(ValueError, match=r"layer_types .*num_hidden_layers is 1 .*\b12 tensors"):
        engine.load(saved / "checkpoints" / "global_step_1" / "actor")
    after = engine.model.hf.state_dict()
    assert all(torch.equal(value, after[name].full_tensor()) for name, value in before.items())
