"""Memory: what a micro-batch needs at least, what there is, and which errors say that it was not enough.

CUDA says no and the process lives on. A Linux machine says yes and kills the process later, so on a CPU what plainly
cannot fit is refused before it is tried.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

import torch

from app.errors import TinworksError
from workers.model.base import BaseModel
from workers.model.checkpointing import kept_per_token

ALWAYS_TRIED_BYTES = 256 * 2**20
"""A micro-batch that needs less is not worth a look at what is free."""
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class OutOfMemory(TinworksError):
    """A request needs more memory than this worker has for it, however it is cut up."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def refuse_what_cannot_fit(base: BaseModel, tokens: int, *, backward: bool) -> None:
    """Raises OutOfMemory if a micro-batch of so many tokens, padding included, needs more than the host has free.

    A lower bound is compared: one layer's activations, and with `backward` the inputs of all layers.
    """
    if base.device.type != "cpu":
        return
    needed = tokens * _least_per_token(base, backward) * base.dtype.itemsize
    if needed > ALWAYS_TRIED_BYTES and needed > (free := free_bytes()):
        raise OutOfMemory(f"{tokens} tokens at once need {_gib(needed)}, and the worker has {_gib(free)} left")


def _least_per_token(base: BaseModel, backward: bool) -> int:
    """Numbers; 0 for a model whose configuration does not say."""
    config = base.config
    with suppress(AttributeError, TypeError):
        layers = int(config.num_hidden_layers)
        return kept_per_token(config) // layers + (layers * int(config.hidden_size) if backward else 0)
    return 0


def does_not_fit(longest: int, cause: BaseException) -> OutOfMemory:
    """The end of a request that was tried a datum at a time. `longest`: tokens of its longest one."""
    detail = f": {cause.detail}" if isinstance(cause, OutOfMemory) else ""
    return OutOfMemory(
        f"the worker's memory does not hold its longest datum ({longest} tokens) even by itself{detail}; send shorter "
        "datums, or ask for a larger worker"
    )


def release() -> None:
    """Give back what a failed allocation has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes() -> int:
    """Memory that this process may still take: the machine's, or its container's if that is less."""
    free = [_available(), _left_in_container()]
    return min((value for value in free if value is not None), default=2**63)


def _available() -> int | None:
    with suppress(OSError, ValueError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_container() -> int | None:
    with suppress(OSError, ValueError):
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
