"""After a method has come twice, full collections leave out all that was there before."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from verl.single_controller.ray.actors import RayRankHost
from verl.utils.resources import freeze_gc


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


class Node:
    def __init__(self) -> None:
        self.itself: Node | None = self


def test_what_is_alive_is_left_out_and_what_comes_later_is_still_collected():
    freeze_gc()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None, "a circle of its own"


def test_a_circle_that_was_garbage_before_is_gone():
    gone = weakref.ref(Node())
    freeze_gc()
    assert gone() is None


def test_what_was_left_out_is_freed_when_nobody_refers_to_it():
    node = Node()
    freeze_gc()
    gone, node.itself = weakref.ref(node), None
    del node
    assert gone() is None


def test_a_rank_freezes_objects_after_the_second_call_of_a_method():
    host = RayRankHost()
    host.workers["actor"] = [3, 1]
    frozen = []
    calls = (
        ("count", "control"),
        ("count", "control"),
        ("count", "compute"),
        ("count", "compute"),
        ("index", "compute"),
    )
    for method, lane in calls:
        host.call("actor", method, [3], {}, lane)
        frozen.append(gc.get_freeze_count())
    assert frozen[:3] == [0, 0, 0], "a control call may come in the middle of a step"
    # Other threads of the process may free frozen objects in between; a second freeze would add thousands.
    assert 0 < frozen[4] <= frozen[3]


THREAD_ALLOCATIONS = """
import threading
from verl.utils.process_tree import resident_bytes
from verl.utils.resources import trim_heap, use_single_heap
{first}
large = bytearray(30 << 20)
del large  # from now on glibc keeps up to 60 MB of free memory in each heap
def allocate():
    blocks = [bytearray(100_000) for _ in range(500)]
before = resident_bytes()
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
trim_heap()
print((resident_bytes() - before) >> 20)
"""


def test_memory_that_a_thread_has_freed_is_returned_to_the_system():
    kept = {
        first: int(subprocess.check_output([sys.executable, "-c", THREAD_ALLOCATIONS.format(first=first)]))
        for first in ("", "use_single_heap()")
    }
    assert kept["use_single_heap()"] < 10
    assert kept[""] > 20, "glibc returns it by itself: use_single_heap is not needed any more"
