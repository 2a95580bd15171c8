"""Memory and requests/s of the inference server.

    python benchmarks/server_memory.py --model ~/models/SmolLM2-135M-Instruct [--bursts 10] [--max-model-len 2048]
    python benchmarks/server_memory.py --model ~/models/tiny --bursts 0 --small 2000

On a CPU, a page of the KV cache becomes resident when its block is used for the first time. The prefix cache prefers
unused blocks, so each burst of new prompts makes more blocks resident, until all blocks are. After each burst
of 200 requests (half of them streamed) this prints the resident memory of the server, the part of the KV mapping, and
the other memory, which must remain constant.

`--small N` sends N completions of one token from 16 connections, five times, and prints requests/s and the CPU time of
the server and its processes per request: with a tiny model, the cost of HTTP, parsing and encoding.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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
_SMALL_RUNS = 5
_CONNECTIONS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--bursts", type=int, default=10, help="number of bursts")
    parser.add_argument("--requests", type=int, default=200, help="requests per burst")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--small", type=int, default=0, help="small requests per run (default: no such runs)")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, "-m", "verl.inference.server", "--model", options.model, "--port", "0"]
        limits = ["--device", "cpu", "--max-num-seqs", "32", "--max-model-len", str(options.max_model_len)]
        with open(log.name, "w") as sink:
            process = subprocess.Popen([*command, *limits], stdout=sink, stderr=sink)
        try:
            address = _wait_for_address(process, log.name)
            print("burst  resident MB  of which KV  other MB  children  seconds")
            for burst in range(options.bursts + 1):
                began = time.monotonic()
                if burst:
                    asyncio.run(_send_burst(address, burst, options.requests))
                _print_memory(psutil.Process(process.pid), burst, time.monotonic() - began)
            print(re.search(r"[\d.]+ GB of KV .*", Path(log.name).read_text())[0])
            for run in range(_SMALL_RUNS + 1 if options.small else 0):  # the first one warms up
                rate, cpu = _measure_small(address, psutil.Process(process.pid), options.small)
                if run:
                    print(f"small requests: {rate:.0f}/s, {1000 * cpu:.2f} ms CPU per request", flush=True)
        finally:
            process.terminate()
            process.wait()


def _wait_for_address(process: subprocess.Popen, log: str) -> str:
    while not (match := re.search(r"at (http://127\.0\.0\.1:\d+/v1)", Path(log).read_text())):
        if process.poll() is not None:
            sys.exit(Path(log).read_text())
        time.sleep(0.1)
    return match[1]


async def _send_burst(address: str, burst: int, count: int) -> None:
    async with openai.AsyncOpenAI(base_url=address, api_key="any", max_retries=0, timeout=3600) as client:
        model = (await client.models.list()).data[0].id

        async def send(number: int) -> None:
            prompt = f"burst {burst} question {number} " + "and so on " * 6
            settings = {"max_tokens": 32, "stream": bool(number % 2), "extra_body": {"ignore_eos": True}}
            response = await client.completions.create(model=model, prompt=prompt, **settings)
            if number % 2:
                async for _ in response:
                    pass

        await asyncio.gather(*map(send, range(count)))


def _measure_small(address: str, server: psutil.Process, count: int) -> tuple[float, float]:
    """(requests/s, CPU seconds of the server per request)."""
    before, began = _cpu_seconds(server), time.monotonic()
    asyncio.run(_small_requests(address, count))
    return count / (time.monotonic() - began), (_cpu_seconds(server) - before) / count


def _cpu_seconds(server: psutil.Process) -> float:
    """CPU seconds of the server and its child processes, including those that have ended."""
    total = 0.0
    for process in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


async def _small_requests(address: str, count: int) -> None:
    """Send requests with a minimal client, which shares the cores with the server."""
    host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
    remaining = iter(range(count))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in remaining:
            body = json.dumps({"prompt": f"question {number}", "max_tokens": 1, "temperature": 0}).encode()
            headers = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            writer.write(f"{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in head:
                sys.exit(head.decode())
            length = re.search(rb"content-length: (\d+)", head)
            await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n"))
        writer.close()

    await asyncio.gather(*(connection() for _ in range(_CONNECTIONS)))


def _print_memory(process: psutil.Process, burst: int, seconds: float) -> None:
    resident, kv = process.memory_info().rss, _largest_anonymous(process.pid)
    children = sum(child.memory_full_info().uss for child in process.children(recursive=True))
    print(
        f"{burst:5d}  {resident / MB:11.0f}  {kv / MB:11.1f}  {(resident - kv) / MB:8.1f}"
        f"  {children / MB:8.0f}  {seconds:7.1f}",
        flush=True,
    )


def _largest_anonymous(pid: int) -> int:
    """Resident bytes of the largest writable anonymous mapping, which contains the KV cache."""
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
