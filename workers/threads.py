"""How many cores each loop of a worker computes with.

OpenMP keeps a team of threads for each thread that computes. While all teams together fit the cores, idle members spin
for a moment and the next parallel region starts at once; with one thread more, libgomp puts them to sleep between
regions, which made a small model's pass twice as slow (two cores: 55 ms against 28). So the main thread never computes
with more than one, and the loops share the cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

MOST_THREADS = 8
SWITCH_INTERVAL_S = 0.0005


def prepare_process() -> None:
    """Call in the main thread before anything is computed: one thread for it, and short turns for all at the GIL."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def use_threads(count: int) -> None:
    """Let the calling thread compute with `count` threads; others keep what they have.

    torch's own call sets OpenMP for this thread but MKL for the whole process, so MKL is told again, for this thread.
    The first `get` counts: a thread's initial value would else be taken from whoever called last.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
    set_mkl = getattr(_torch_library(), "MKL_Set_Num_Threads_Local", None)
    if set_mkl is not None:
        set_mkl(ctypes.c_int(count))


@lru_cache(maxsize=1)
def _torch_library() -> ctypes.CDLL | None:
    """The library that torch computes with, where MKL is part of it."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libtorch_cpu.so"))
    return ctypes.CDLL(str(found[0])) if found else None


def share_cores(roles: Sequence[str], configured: int) -> dict[str, int]:
    """Threads for each role. `configured` is the number for the whole worker; 0: one per core, at most MOST_THREADS."""
    cores = configured or max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))
    if len(roles) == 1:
        return {roles[0]: cores}
    sample = max(1, cores // 2)
    return {"train": max(1, cores - sample + 1), "sample": sample}
