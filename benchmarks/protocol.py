"""Cost of DataProto operations, compared with a memory copy of the same bytes and with a dict of tensors.

`python benchmarks/protocol.py [--rows 16384 --tokens 4096 --fields 6 --repeats 5 --json PATH]`. The rows are halved
until the batch takes at most 1/16 of the memory and of the free shared memory. All times are medians after a warm-up.
There are two limits: `clone` of flat tensors (fresh memory, required by any result that is not a view), and `copy_`
into existing memory (possible with a warm object store).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import report

from verl.protocol import DataProto, object_array

PIECE = 2**28
FIELDS = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "old_log_probs": torch.float32,
    "position_ids": torch.int64,
    "advantages": torch.float32,
    "response_mask": torch.bool,
}


def main() -> None:
    """Run all measurements and print the tables."""
    arguments = parse_arguments()
    rows = fitting_rows(arguments.rows, arguments.tokens, arguments.fields)
    data = make_batch(rows, arguments.tokens, arguments.fields)
    size = data.nbytes
    title = (
        f"DataProto of {rows} x {arguments.tokens} tokens x {arguments.fields} fields = {size / 1e9:.2f} GB"
        f" (scale: 1/{arguments.rows // rows} of {arguments.rows} rows)"
    )
    limits = Limits(size, arguments.repeats)
    table = in_process(data, limits, arguments.repeats)
    table += on_disk(data, limits, min(arguments.repeats, 3))
    table += through_ray(data, limits, arguments.repeats)
    report(title, limits.rows() + table, arguments.json)


class Limits:
    """Medians of the plain copies, repeated before each group of measurements because the machine may be shared."""

    def __init__(self, size: int, repeats: int) -> None:
        self._size, self._repeats = size, repeats
        self.measure()

    def measure(self) -> None:
        """Time both copies now."""
        source, target = torch.ones(self._size, dtype=torch.uint8), torch.zeros(self._size, dtype=torch.uint8)
        self.copy = median_seconds(lambda: target.copy_(source), self._repeats)
        # In pieces: allocators return blocks of 1 GiB and more to the system each time, and page faults cost several
        # times the copy, which would make the limit too slow.
        pieces = source.split(PIECE)
        self.clone = median_seconds(lambda: [piece.clone() for piece in pieces], self._repeats)

    def rows(self) -> list[dict[str, Any]]:
        """The limits of the last measurement."""
        return [
            self.row("plain clone (flat pieces of 256 MB)", self.clone),
            self.row("plain copy_ into existing memory", self.copy),
        ]

    def row(self, name: str, seconds: float, dict_s: float | None = None) -> dict[str, Any]:
        """One line of the table."""
        return {
            "operation": name,
            "ms": seconds * 1e3,
            "x clone": seconds / self.clone,
            "x copy_": seconds / self.copy,
            "dict of tensors ms": dict_s * 1e3 if dict_s is not None else None,
            "dict / DataProto": dict_s / seconds if dict_s is not None else None,
        }


def in_process(data: DataProto, limits: Limits, repeats: int) -> list[dict[str, Any]]:
    """Views, gathers and pickles, compared with the same on a dict of tensors."""
    plain = dict(data.batch.items())
    equal_data = data.select(deepcopy=True)
    order = torch.randperm(len(data))
    count = math.gcd(8, len(data))
    parts, plain_parts = data.chunk(count), [dict(part.batch.items()) for part in data.chunk(count)]
    half = list(plain)[: len(plain) // 2 or 1]
    other_half = data.select([key for key in plain if key not in half] or half, [])
    cases: list[tuple[str, Callable[[], Any], Callable[[], Any] | None]] = [
        (f"split into {count} (views)", lambda: data.split(len(data) // count), None),
        (f"chunk into {count} (views)", lambda: data.chunk(count), None),
        ("select half of the columns (views)", lambda: data.select(half), None),
        ("union of halves (views)", lambda: data.select(half).union(other_half), None),
        ("union of equal columns (compared)", lambda: data.select().union(equal_data), None),
        (
            f"concat {count} parts",
            lambda: DataProto.concat(parts),
            lambda: {key: torch.cat([part[key] for part in plain_parts]) for key in plain},
        ),
        (
            "reorder (random)",
            lambda: reordered(data, order),
            lambda: {key: value[order] for key, value in plain.items()},
        ),
        (
            "repeat x2 (twice the bytes)",
            lambda: data.repeat(2),
            lambda: {key: value.repeat_interleave(2, dim=0) for key, value in plain.items()},
        ),
        ("pickle dumps + loads, in-band", lambda: pickle_in_band(data), lambda: pickle_in_band(plain)),
        ("pickle dumps + loads, out-of-band", lambda: pickle_out_of_band(data), lambda: pickle_out_of_band(plain)),
    ]
    table = []
    for name, operation, dict_operation in cases:
        seconds = median_seconds(operation, repeats)
        dict_seconds = median_seconds(dict_operation, repeats) if dict_operation else None
        table.append(limits.row(name, seconds, dict_seconds))
    return table


def on_disk(data: DataProto, limits: Limits, repeats: int) -> list[dict[str, Any]]:
    """Saving (with fsync) and loading, compared with torch.save of a dict of tensors."""
    plain = dict(data.batch.items())
    limits.measure()
    with tempfile.TemporaryDirectory() as folder:
        batch_file, dict_file = Path(folder) / "batch.pt", Path(folder) / "dict.pt"

        def save_plainly() -> None:
            with dict_file.open("wb") as stream:
                torch.save(plain, stream)
                stream.flush()
                os.fsync(stream.fileno())

        save_s = median_seconds(lambda: data.save_to_disk(batch_file), repeats)
        table = [limits.row("save_to_disk", save_s, median_seconds(save_plainly, repeats))]
        load_s = median_seconds(lambda: DataProto.load_from_disk(batch_file), repeats)
        plain_s = median_seconds(lambda: torch.load(dict_file, weights_only=True), repeats)
        table.append(limits.row("load_from_disk (mapped)", load_s, plain_s))
        load_s = median_seconds(lambda: DataProto.load_from_disk(batch_file).batch.clone(), repeats)
        table.append(limits.row("load_from_disk + copy (cached file)", load_s, plain_s))
    return table


def through_ray(data: DataProto, limits: Limits, repeats: int) -> list[dict[str, Any]]:
    """put + get on a store whose pages have been touched."""
    import ray

    plain = dict(data.batch.items())
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=5 * data.nbytes + 2**28,
    )
    try:

        def put_get(value: Any) -> Any:
            return ray.get(ray.put(value))

        for _ in range(4):  # touch the pages of the store
            put_get(data)
        limits.measure()
        table = []
        for name, operation, dict_operation in (
            ("ray put + get (aliases the store)", lambda: put_get(data), lambda: put_get(plain)),
            ("ray put + get + batch (a private copy)", lambda: put_get(data).batch, None),
            ("ray put + get of half the rows (views)", lambda: put_get(data[: len(data) // 2]), None),
        ):
            # Freeing a stored object is asynchronous; after the pause its pages are available to the next put.
            seconds = median_seconds(operation, repeats, pause=0.3)
            dict_seconds = median_seconds(dict_operation, repeats, pause=0.3) if dict_operation else None
            table.append(limits.row(name, seconds, dict_seconds))
        return table
    finally:
        ray.shutdown()


def reordered(data: DataProto, order: torch.Tensor) -> DataProto:
    """`reorder` works in place; the batch itself is needed again."""
    result = data.select()
    result.reorder(order)
    return result


def pickle_in_band(value: Any) -> Any:
    """Through one byte string."""
    return pickle.loads(pickle.dumps(value, protocol=5))


def pickle_out_of_band(value: Any) -> Any:
    """Pickle protocol 5: large buffers out of band, if the type supports it."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=buffers)


def median_seconds(call: Callable[[], Any], repeats: int, pause: float = 0.0) -> float:
    """Median time of a call after two warm-up calls; freeing its result is not timed."""
    times = []
    for _ in range(repeats + 2):
        gc.collect()
        time.sleep(pause)
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        del result
    return statistics.median(times[2:])


def fitting_rows(rows: int, tokens: int, fields: int) -> int:
    """`rows` halved until the batch fits in 1/16 of the memory, and of the shared memory where Ray keeps its store."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if os.path.isdir("/dev/shm"):
        memory = min(memory, shutil.disk_usage("/dev/shm").free)
    per_row = tokens * sum(dtype.itemsize for dtype in field_types(fields).values())
    while rows > 1 and rows * per_row > memory / 16:
        rows //= 2
    return rows


def field_types(count: int) -> dict[str, torch.dtype]:
    """Names and dtypes of `count` columns; beyond six, the names are repeated with a numeric suffix."""
    names = list(FIELDS)
    return {
        names[i % len(names)] + (f"_{i // len(names)}" if i >= len(names) else ""): FIELDS[names[i % len(names)]]
        for i in range(count)
    }


def make_batch(rows: int, tokens: int, fields: int) -> DataProto:
    """Random token columns, a uid and a ragged list per row."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in field_types(fields).items():
        tensors[name] = torch.randint(0, 100, (rows, tokens), generator=generator, dtype=torch.uint8).to(dtype)
    objects = {
        "uid": object_array([f"prompt-{i}" for i in range(rows)]),
        "turns": object_array([[i] for i in range(rows)]),
    }
    return DataProto.from_dict(tensors, objects, meta_info={"temperature": 1.0})


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--fields", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default=None, help="append the result to this file as one JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
