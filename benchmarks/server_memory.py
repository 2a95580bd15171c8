"""Memory of the server over storms of requests: what rises is KV memory that is used for the first time.

    python benchmarks/server_memory.py --model ~/models/SmolLM2-135M-Instruct [--storms 10] [--max-model-len 2048]

On a CPU the KV memory that the log announces at start is taken page by page, when a block is used for the first time;
the prefix cache keeps blocks with known content and prefers blank ones, so every storm of new prompts uses new ones
until all have been. After each storm of 200 requests (half of them streamed) this prints the resident memory of the
server, how much of it is the KV mapping, and the rest, which is to stay where it is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai
import psutil

MB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--storms", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200, help="of one storm")
    parser.add_argument("--max-model-len", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, "-m", "verl.inference.server", "--model", options.model, "--port", "0"]
        limits = ["--device", "cpu", "--max-num-seqs", "32", "--max-model-len", str(options.max_model_len)]
        with open(log.name, "w") as sink:
            process = subprocess.Popen([*command, *limits], stdout=sink, stderr=sink)
        try:
            address = _wait_for(process, log.name)
            print("storm  resident MB  of which KV  the rest  children  seconds")
            for storm in range(options.storms + 1):
                began = time.monotonic()
                if storm:
                    asyncio.run(_storm(address, storm, options.requests))
                _show(psutil.Process(process.pid), storm, time.monotonic() - began)
            print(re.search(r"[\d.]+ GB of KV memory.*", Path(log.name).read_text())[0])
        finally:
            process.terminate()
            process.wait()


def _wait_for(process: subprocess.Popen, log: str) -> str:
    while not (found := re.search(r"at (http://127\.0\.0\.1:\d+/v1)", Path(log).read_text())):
        if process.poll() is not None:
            sys.exit(Path(log).read_text())
        time.sleep(0.1)
    return found[1]


async def _storm(address: str, storm: int, count: int) -> None:
    async with openai.AsyncOpenAI(base_url=address, api_key="any", max_retries=0, timeout=3600) as client:
        model = (await client.models.list()).data[0].id

        async def ask(number: int) -> None:
            words = f"storm {storm} question {number} " + "and so on " * 6
            more = {"max_tokens": 32, "stream": bool(number % 2), "extra_body": {"ignore_eos": True}}
            answer = await client.completions.create(model=model, prompt=words, **more)
            if number % 2:
                async for _ in answer:
                    pass

        await asyncio.gather(*map(ask, range(count)))


def _show(process: psutil.Process, storm: int, seconds: float) -> None:
    resident, kv = process.memory_info().rss, _largest_anonymous(process.pid)
    children = sum(child.memory_full_info().uss for child in process.children(recursive=True))
    print(
        f"{storm:5d}  {resident / MB:11.0f}  {kv / MB:11.1f}  {(resident - kv) / MB:8.1f}"
        f"  {children / MB:8.0f}  {seconds:7.1f}",
        flush=True,
    )


def _largest_anonymous(pid: int) -> int:
    """Resident bytes of the largest mapping without a file that can be written: the one with the KV memory in it."""
    best, size, rss = 0, 0, 0
    with open(f"/proc/{pid}/smaps") as lines:
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                parts = line.split()
                low, high = (int(part, 16) for part in parts[0].split("-"))
                size = high - low if parts[1].startswith("rw") and len(parts) == 5 else 0
            elif line.startswith("Rss:") and size > best:
                best, rss = size, int(line.split()[1]) * 1024
    return rss


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
