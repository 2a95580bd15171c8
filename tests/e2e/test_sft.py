"""`python -m verl.trainer.main_sft` as users run it: the example script, mistakes, two ranks on Ray or by torchrun."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.tiny import STEADY_EPS, save_tiny_model

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
RAW = [
    {"question": f"Tom has {i} apples and gets {j}. How many?", "answer": f"{i}+{j}=<<{i}+{j}={i + j}>>\n#### {i + j}"}
    for i in range(3)
    for j in range(3)
]


def run(command, cwd, timeout=120):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # `python3` of the scripts is ours
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"PATH": path, "RAY_ADDRESS": "local"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def main_sft(*arguments, cwd):
    return run([sys.executable, "-m", "verl.trainer.main_sft", *arguments], cwd)


@pytest.mark.slow
def test_the_example_trains_on_preprocessed_gsm8k_and_its_checkpoint_is_a_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "data_preprocess"))  # the script imports its neighbour
    training_row = runpy.run_path(str(ROOT / "examples" / "data_preprocess" / "gsm8k.py"))["training_row"]
    for split in ("train", "test"):
        rows = [training_row(item, index, split) for index, item in enumerate(RAW)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    save_tiny_model(tmp_path / "tiny")
    script = ROOT / "examples" / "sft" / "run_gsm8k_sft.sh"
    small = ["model.path=tiny", "data.max_length=512", "data.train_batch_size=4", "trainer.total_epochs=2"]
    small.append("trainer.device=cpu")
    done = run(["env", "DATA_DIR=.", "bash", str(script), *small, "optim.lr=1e-3"], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2", "step 3", "step 4"]
    assert "val_loss" in lines[0]
    assert "val_loss" in lines[-1]
    assert "Batch plan: 4 rows" in done.stderr
    folder = tmp_path / "checkpoints" / "gsm8k-sft" / "qwen2.5-0.5b-instruct" / "global_step_4" / "huggingface"
    trained = AutoModelForCausalLM.from_pretrained(folder)
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    assert not torch.equal(trained.lm_head.weight, first.lm_head.weight)


def test_mistakes_are_all_listed_before_anything_heavy_is_imported(tmp_path):
    done = main_sft(
        "data.train_files=no.parquet", "data.train_batch_size=6", "optim.lr=fast", "optm.lr=1", cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert {line.split(" = ")[0] for line in lines[1:]} == {
        "1. optm.lr",
        "2. optim.lr",
        "3. model.path",
        "4. data.train_files",
    }
    assert list(tmp_path.iterdir()) == []
    program = "import sys, verl.trainer.main_sft; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    assert run([sys.executable, "-c", program], tmp_path).stdout.strip() == "set()"


MORTAL = """
import os, pathlib
from verl.utils.dataset.sft_dataset import SFTDataset

class Mortal(SFTDataset):
    def __getitem__(self, index):
        told = pathlib.Path("died")
        if os.environ.get("MORTAL") and pathlib.Path(os.environ["MORTAL"]).is_dir() and not told.exists():
            told.touch()
            os.kill(os.getpid(), 9)
        return super().__getitem__(index)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_by_itself_though_it_was_not_to_resume(tmp_path, monkeypatch):
    """`resume_mode=disable` is about steps of others: what this command saved is its own."""
    save_tiny_model(tmp_path / "tiny")
    (tmp_path / "mortal.py").write_text(MORTAL)
    rows = [{"prompt": row["question"], "response": row["answer"]} for row in RAW[:8]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["data.train_files=rows.jsonl", "data.max_length=512", "data.train_batch_size=4", "model.path=tiny"]
    common += ["data.custom_cls.path=mortal.py", "data.custom_cls.name=Mortal", "data.dataloader_num_workers=0"]
    common += ["trainer.save_freq=1", "trainer.total_training_steps=6", "trainer.device=cpu", "trainer.logger=file"]
    common += ["trainer.resume_mode=disable"]
    folders = {name: tmp_path / "checkpoints" / "verl" / name for name in ("whole", "mortal")}
    for name in folders:
        monkeypatch.setenv("MORTAL", str(folders["mortal"] / "global_step_2"))
        done = main_sft(*common, f"trainer.experiment_name={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL; resumes at step " in done.stderr
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "runs/verl/mortal/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6], "one run for the tracker"
    whole, mortal = (load_file(path / "global_step_6/huggingface/model.safetensors") for path in folders.values())
    assert all(torch.equal(mortal[name], weight) for name, weight in whole.items())


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ray", "torchrun"])
def test_two_ranks_learn_what_one_learns(tmp_path, launcher):
    save_tiny_model(tmp_path / "tiny")
    rows = [{"prompt": row["question"] * (1 + i % 3), "response": row["answer"]} for i, row in enumerate(RAW)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["data.train_files=rows.jsonl", "data.val_files=rows.jsonl", "data.train_batch_size=4"]
    common += ["data.val_batch_size=3", "data.micro_batch_size_per_gpu=1", "data.max_length=512", "optim.lr=1e-3"]
    common += [f"optim.eps={STEADY_EPS}", "trainer.device=cpu", "trainer.total_epochs=2", "trainer.logger=file"]
    done = main_sft(*common, "model.path=tiny", "trainer.experiment_name=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    common.append("trainer.experiment_name=2")
    if launcher == "ray":
        done = main_sft(*common, "model.path=tiny", "trainer.n_gpus_per_node=2", cwd=tmp_path)
    else:
        older = ["verl.trainer.fsdp_sft_trainer", *common, "model.partial_pretrain=tiny"]
        done = run([sys.executable, *TORCHRUN, *older], tmp_path)
    assert done.returncode == 0, done.stderr
    runs = [logged(tmp_path / "runs" / "verl" / name) for name in ("1", "2")]
    names = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
    for one, two in zip(*runs, strict=True):
        assert [one[name] for name in names if name in one] == pytest.approx(
            [two[name] for name in names if name in two], rel=1e-5
        )
    weights = [
        load_file(tmp_path / "checkpoints" / "verl" / name / "global_step_4" / "huggingface" / "model.safetensors")
        for name in ("1", "2")
    ]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=2e-6, msg=name)


def logged(folder):
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
