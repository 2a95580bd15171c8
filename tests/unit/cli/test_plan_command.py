"""`verl plan`: report, JSON, exit codes and errors, without GPU and weights."""

import json

import pytest

from tests.support.tiny import tiny_config
from verl.cli.plan import main, parse_arguments, planned_run
from verl.planning.catalog import GPUS

MODEL = "actor_rollout_ref.model.path"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("verl.config.devices.gpu_memory", lambda: None)
    monkeypatch.setattr("verl.cli.plan.hub_config", lambda name, key, download: None)


@pytest.fixture
def model(tmp_path):
    """A folder that has nothing but a config.json."""
    tiny_config().to_json_file(tmp_path / "config.json")
    return str(tmp_path)


def report_of(capsys, *arguments, code=0):
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def error_of(capsys, *arguments):
    assert main(list(arguments)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


@pytest.mark.parametrize(("gpus", "note"), [(0, "has no GPU"), (1, "memory of this machine's GPU is unknown")])
def test_the_note_on_the_default_gpu_has_its_reason(capsys, monkeypatch, gpus, note):
    monkeypatch.setattr("verl.config.devices.has_no_gpu", lambda: not gpus)
    assert note in " ".join(report_of(capsys, f"{MODEL}=Qwen/Qwen2.5-0.5B-Instruct", "algorithm=grpo")["notes"])


def test_a_run_that_fits(capsys):
    report = report_of(capsys, f"{MODEL}=Qwen/Qwen2.5-0.5B-Instruct", "algorithm=grpo", "--gpu", "h200")
    assert (report["fits"], report["verdict"], report["changes"]) == (True, "fits", [])
    phases = {phase["phase"]: phase for phase in report["phases"]}
    assert [name for name in phases if phases[name]["location"] == "device"] == ["gen", "old_log_prob", "update_actor"]
    assert phases["update_actor"]["role"] == "actor"
    assert phases["train"]["location"] == "host"
    assert phases["gen"]["capacity_gb"] == pytest.approx(139.8, abs=0.01)
    (role,) = report["roles"]
    parameters = role["parameters"]
    assert role["weights_gb"] == pytest.approx(4 * parameters / 2**30, abs=1e-3)
    assert role["optimizer_gb"] == pytest.approx(8 * parameters / 2**30, abs=1e-3)
    # float32 weights and moments, and the exported model in bf16.
    assert report["checkpoint_gb"] == {ACTOR: pytest.approx(14 * parameters / 2**30, abs=1e-2)}
    assert report["step_seconds"] == pytest.approx(sum(phase["seconds"] for phase in report["seconds"].values()))


def test_7b_on_two_4090s_does_not_fit_and_lists_what_would(capsys):
    arguments = [f"{MODEL}=Qwen/Qwen2.5-7B-Instruct", "algorithm=grpo", "--gpu", "4090", "--gpus", "2"]
    report = report_of(capsys, *arguments, code=1)
    assert (report["verdict"], report["fits_with_changes"]) == ("too large", False)
    assert report["largest"]["batch"]["value"] is None
    assert report["largest"]["model"]["as_configured"] == "Qwen2.5-1.5B"
    assert not any(phase["measured"] for phase in report["seconds"].values())
    assert main(arguments) == 1
    assert "actor_rollout_ref.model.lora_rank=32" in capsys.readouterr().out
    with_lora = [*arguments, "actor_rollout_ref.model.lora_rank=32", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    assert report_of(capsys, *with_lora)["fits_with_changes"]  # engines keep the frozen weights
    assert report_of(capsys, *with_lora, f"{ROLLOUT}.free_weights=True")["fits"]


def test_changes_make_a_run_fit_and_are_those_of_auto_memory(capsys):
    arguments = [f"{MODEL}=Qwen/Qwen2.5-7B", "algorithm=grpo", "trainer.auto_memory=False", "--gpu", "120"]
    report = report_of(capsys, *arguments, code=1)
    assert report["fits_with_changes"]
    changes = {change["key"]: change["value"] for change in report["changes"]}
    assert all(change["gb"] < change["before_gb"] and change["cost"] for change in report["changes"])
    overrides = [f"{key}={value}" for key, value in changes.items()]
    assert report_of(capsys, *arguments, *overrides)["fits"]
    assert report["largest"]["length"]["value"] >= 512, "with these changes"


def test_the_largest_values_fit_and_the_next_do_not(capsys):
    arguments = [f"{MODEL}=Qwen/Qwen2.5-1.5B", "algorithm=grpo", "--gpu", "40"]
    run, largest = planned_run(parse_arguments(arguments)), report_of(capsys, *arguments)["largest"]
    assert largest["model"]["as_configured"] == "Qwen2.5-1.5B"
    for name, step in (("batch", 2), ("length", 1.1)):
        key, value = largest[name]["key"], largest[name]["value"]
        assert largest[name]["now"] < value < largest[name]["limit"]
        assert not run.plan(run.load([f"{key}={value}"])).excess
        assert run.plan(run.load([f"{key}={int(step * value)}"])).excess


def test_a_config_file_is_enough_and_a_critic_has_a_role(capsys, model):
    report = report_of(
        capsys, f"{MODEL}={model}", "data.max_prompt_length=64", "data.max_response_length=64", "--gpu", "l40s"
    )
    assert [role["role"] for role in report["roles"]] == ["actor", "critic"]
    assert set(report["checkpoint_gb"]) == {ACTOR, "critic"}
    same = report_of(
        capsys,
        f"{MODEL}={model}/config.json",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "--gpu",
        "l40s",
    )
    assert same["phases"] == report["phases"]


@pytest.mark.parametrize("program", ["sft", "rm"])
def test_supervised_programs(capsys, program):
    arguments = [program, "model.path=Qwen/Qwen2.5-0.5B", "data.max_length=2048", "--gpu", "h100-80g", "--gpus", "2"]
    report = report_of(capsys, *arguments)
    assert [phase["phase"] for phase in report["phases"]] == ["sft", "sft_train", "sft_save_checkpoint"]
    assert report["gpus_per_node"] == 2
    assert list(report["seconds"]) == ["sft"]


def test_hardware_options_and_overrides_of_the_run_agree():
    path = f"{MODEL}=Qwen/Qwen2.5-0.5B"
    by_option = planned_run(parse_arguments([path, "--gpu", "h200", "--gpus", "4", "--nodes", "2"]))
    by_key = planned_run(parse_arguments([path, "trainer.n_gpus_per_node=4", "trainer.nnodes=2", "--gpu", "h200"]))
    assert by_option.plan(by_option.config) == by_key.plan(by_key.config)
    assert by_option.config.trainer.nnodes == 2
    small_host = planned_run(parse_arguments([path, "--gpu", "h200", "--host-gb", "4"]))
    worst = small_host.plan(small_host.config).worst_phase
    assert worst.on_host
    assert worst.excess


def test_a_yaml_file_of_the_user(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "actor_rollout_ref:\n  model:\n    path: Qwen/Qwen2.5-0.5B\ntrainer:\n  n_gpus_per_node: 2\n"
    )
    report = report_of(
        capsys, "--config-path", str(tmp_path), "--config-name", "mine", "algorithm=grpo", "--gpu", "h200"
    )
    assert report["gpus_per_node"] == 2
    assert [role["role"] for role in report["roles"]] == ["actor"]
    assert "'none'" in error_of(capsys, "--config-path", str(tmp_path), "--config-name", "none", "--gpu", "h200")


def test_the_text_has_a_verdict_tables_and_a_note(capsys):
    assert main([f"{MODEL}=Qwen/Qwen2.5-0.5B", "algorithm=grpo"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("The run fits on 1 node x 1 x h200")
    for part in (
        "Note: planned for the h200",
        "phases: gen: generation;",
        "columns: gathered: ",
        "update_actor",
        "Host memory",
        "State of each role",
        "Checkpoint:",
        "step ",
    ):
        assert part in text


def test_a_tight_plan_names_its_uncertainty(capsys):
    size = "--gpu=24"
    assert main(["sft", "model.path=Qwen/Qwen2.5-7B-Instruct", size, "--gpus", "4", "--nodes", "2"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("The run may just fit on 2 nodes x 4 x GPU of 24 GB: sft takes ")
    assert first.endswith("within the uncertainty of the plan (7%).")


def test_a_count_that_is_no_number_is_an_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        main([f"{MODEL}=Qwen/Qwen2.5-0.5B", "--gpus", "x"])
    assert exit_.value.code == 2
    assert "--gpus: must be an integer of at least 1, not x" in capsys.readouterr().err


def test_a_run_on_cpus_is_planned_for_this_machine(capsys, model):
    lengths = ["data.max_prompt_length=32", "data.max_response_length=32"]
    report = report_of(capsys, f"{MODEL}={model}", "trainer.device=cpu", *lengths)
    assert (report["gpu"], report["seconds"]) == (None, {})
    assert report["device_gb"] > 0


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "x"}', '{"model_type": "nonsense"}', '{"model_type": 3}'])
def test_a_config_that_is_not_a_models(capsys, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    text = error_of(capsys, f"{MODEL}={tmp_path}", "--gpu", "h200")
    assert text.startswith(f"{MODEL}: ")
    assert str(tmp_path / "config.json") in text


def test_folders_without_a_config_and_missing_folders(capsys, tmp_path):
    assert "no config.json" in error_of(capsys, f"{MODEL}={tmp_path}", "--gpu", "h200")
    assert MODEL in error_of(capsys, f"{MODEL}={tmp_path}/missing", "--gpu", "h200")


def test_an_unknown_gpu_lists_the_known_ones(capsys):
    text = error_of(capsys, f"{MODEL}=Qwen/Qwen2.5-0.5B", "--gpu", "h20")
    assert all(name in text for name in GPUS)


def test_impossible_layouts_and_unknown_keys_have_the_message_of_the_run(capsys, model):
    path = f"{MODEL}=Qwen/Qwen2.5-0.5B"
    text = error_of(capsys, path, f"{ROLLOUT}.tensor_model_parallel_size=4", "--gpu", "h200", "--gpus", "2")
    assert f"{ROLLOUT}.tensor_model_parallel_size = 4" in text
    tensor = f"{ACTOR}.megatron_config.tensor_model_parallel_size=8"
    lengths = ["data.max_prompt_length=64", "data.max_response_length=64"]
    run = [f"{MODEL}={model}", "actor_rollout_ref=megatron", tensor, *lengths]
    text = error_of(capsys, *run, "--gpu", "h200", "--gpus", "8")
    assert "megatron_config.tensor_model_parallel_size = 8" in text
    assert "actor_rollout_ref.modle" in error_of(capsys, path, "actor_rollout_ref.modle.path=x", "--gpu", "h200")
    with pytest.raises(SystemExit):
        main([path, "--gpus", "0"])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (
            [f"{MODEL}=Qwen/Qwen2.5-7B", f"{ROLLOUT}.tensor_model_parallel_size=8"],
            f"{ROLLOUT}.tensor_model_parallel_size",
        ),
        ([f"{MODEL}=Qwen/Qwen2.5-7B", f"{ACTOR}.ulysses_sequence_parallel_size=8"], f"{ACTOR}.ulysses_sequence"),
        (["sft", "model.path=Qwen/Qwen2.5-7B", "ulysses_sequence_parallel_size=8"], "ulysses_sequence"),
    ],
)
def test_sizes_that_do_not_divide_the_heads_are_errors(capsys, arguments, key):
    error = error_of(capsys, *arguments, "--gpu", "h200", "--gpus", "8")
    assert f"1. {key}" in error
    assert "28 attention heads" in error
    assert "Use one of 1, 2, 4, 7, 14, 28." in error


def test_key_heads_limit_the_tensor_parallel_size_of_the_native_engine(capsys):
    arguments = [f"{MODEL}=Qwen/Qwen2.5-14B", f"{ROLLOUT}.tensor_model_parallel_size=5", "--gpu", "h200", "--gpus", "5"]
    arguments += ["data.train_batch_size=320", f"{ACTOR}.ppo_mini_batch_size=160", "algorithm=grpo"]
    assert "8 key heads" in error_of(capsys, *arguments)


def test_suggested_sizes_divide_the_heads(capsys):
    """On 8 GPUs a 7B model with 28 heads can use 4 ranks per sequence, not 8."""
    arguments = [f"{MODEL}=Qwen/Qwen2.5-7B", "algorithm=grpo", "--gpu", "24", "--gpus", "8"]
    arguments += ["data.max_response_length=30000"]
    changes = {change["key"]: change["value"] for change in report_of(capsys, *arguments, code=1)["changes"]}
    sizes = {key: value for key, value in changes.items() if key.endswith("parallel_size")}
    assert sizes
    assert all(28 % value == 0 for value in sizes.values())


def test_another_key_limits_the_largest_length(capsys):
    arguments = [f"{MODEL}=Qwen/Qwen2.5-0.5B", "data.max_prompt_length=64", "data.max_response_length=64"]
    arguments += [f"{ROLLOUT}.max_model_len=192", "algorithm=grpo", "--gpu", "h200"]
    length = report_of(capsys, *arguments)["largest"]["length"]
    assert (length["value"], length["limit"], length["reason"]) == (128, 128, f"{ROLLOUT}.max_model_len")
