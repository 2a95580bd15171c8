"""The native engine in a process of its own on the trainer's GPU: weights by CUDA IPC, memory given back, bits equal.

`python -m pytest tests/gpu/test_process_rollout_cuda.py -s` also says how long a hand-over takes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.tiny import save_tiny_model, tiny_model
from tests.support.unsharded_model import UnshardedModel
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.config.names import ROLLOUTS
from verl.types.request import EngineDiedError, Output, Request, SamplingParams
from verl.types.weights import WeightMismatchError
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.process.process_rollout import ProcessRollout
from verl.workers.rollout.process.transport import SharedBuffer
from verl.workers.sharding_manager import InProcessTransfer

pytestmark = pytest.mark.gpu

# Half a GB in bf16.
LARGE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def settings(folder: Any, **keys: Any) -> tuple[str, ModelConfig, RolloutConfig, torch.device]:
    keys = {"max_new_tokens": 16, "max_model_len": 256, "max_num_seqs": 64, "dtype": "bfloat16", **keys}
    return str(folder), as_config(ModelConfig, {"path": str(folder)}), as_config(RolloutConfig, keys), DEVICE


DEVICE = torch.device("cuda", 0)


def answers(rollout: Any) -> list[Output]:
    params = SamplingParams(key=7, temperature=0.8, max_new_tokens=16, ignore_eos=True)
    requests = [Request(f"r{i}", [5 + i, 9, 17], replace(params, key=i)) for i in range(8)]
    return [future.result(300) for future in rollout.submit(requests)]


def on_device(seed: int, **sizes: Any) -> UnshardedModel:
    source = UnshardedModel(tiny_model(seed=seed, **sizes))
    source.weights = {name: tensor.to(DEVICE) for name, tensor in source.weights.items()}
    return source


def open_hosted(monkeypatch: pytest.MonkeyPatch, folder: Any, **keys: Any) -> ProcessRollout:
    monkeypatch.setitem(ROLLOUTS, "native", replace(ROLLOUTS["native"], package="torch"))
    rollout = open_rollout(*settings(folder, **keys))
    assert isinstance(rollout, ProcessRollout)
    return rollout


def test_a_process_on_the_same_gpu_answers_the_same_and_refuses_a_flipped_bit(tmp_path, monkeypatch):
    folder = save_tiny_model(tmp_path / "model", head_dim=32)
    with open_hosted(monkeypatch, folder) as hosted, NativeRollout(*settings(folder)) as inside:
        assert answers(hosted) == answers(inside)
        for rollout in (hosted, inside):
            InProcessTransfer(on_device(5, head_dim=32), rollout, bucket_bytes=20_000).sync(version=3)
        changed = answers(hosted)
        assert changed == answers(inside)
        assert changed[0].versions[-1] == 3
        put = SharedBuffer.put

        def put_and_flip(self: SharedBuffer, bucket: Any, start: int = 0) -> Any:
            handle = put(self, bucket, start)
            self.flat[handle.pieces[-1].start] ^= 1
            torch.cuda.synchronize()
            return handle

        with monkeypatch.context() as patch:
            patch.setattr(SharedBuffer, "put", put_and_flip)
            with pytest.raises(WeightMismatchError, match="fingerprint"):
                InProcessTransfer(on_device(6, head_dim=32), hosted).sync(version=4)
        os.kill(hosted.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            hosted.wait_idle()
        hosted.restart_if_dead()
        InProcessTransfer(on_device(5, head_dim=32), hosted).sync(version=3)
        assert answers(hosted) == changed


def sync_seconds(transfer: InProcessTransfer, version: int) -> float:
    start = time.perf_counter()
    transfer.sync(version)
    return time.perf_counter() - start


def test_memory_is_given_back_and_a_hand_over_goes_by_ipc(tmp_path, monkeypatch):
    folder, source = save_tiny_model(tmp_path / "model", **LARGE), on_device(1, **LARGE)
    with open_hosted(monkeypatch, folder, load_format="dummy", gpu_memory_utilization=0.3) as hosted:
        transfer = InProcessTransfer(source, hosted)
        seconds = [sync_seconds(transfer, version) for version in (1, 2, 3)]
        size = sum(tensor.numel() for tensor in source.weights.values()) * 2 / 1e9
        answers(hosted)
        held, awake = hosted.held_bytes(), torch.cuda.mem_get_info(DEVICE)[0]
        hosted.release()
        freed = torch.cuda.mem_get_info(DEVICE)[0] - awake
        assert freed > 0.9 * sum(held.values())
        assert sum(hosted.held_bytes().values()) == 0
        hosted.resume(["weights"])
        transfer.sync(4)
        hosted.resume()
        assert answers(hosted)[0].versions[-1] == 4
        told = ", ".join(f"{second:.3f}" for second in seconds)
        sys.stdout.write(f"\nhand-over of {size:.2f} GB by CUDA IPC: {told} s; gave back {freed / 1e9:.1f} GB\n")
