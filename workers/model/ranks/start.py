"""How a train worker with several ranks comes to be, on rank 0 and on the others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

import structlog
import torch

from workers.model.preparation import Preparation, prepare
from workers.model.ranks.follower import Follower
from workers.model.ranks.group import RankGroup, listen
from workers.model.ranks.leader import ShardedEngine
from workers.model.ranks.loading import load_spread
from workers.model.ranks.messages import Message
from workers.model.ranks.placement import BadPlacement, Placement
from workers.model.ranks.processes import RankProcesses
from workers.threads import prepare_process

logger = structlog.get_logger(__name__)

LOST_EXIT_CODE = 71


def lead(
    place: Placement,
    *,
    source: str,
    dtype: torch.dtype | None,
    micro_batch_tokens: int,
    threads: int,
    timeout_s: float,
    preparation: Preparation | None = None,
    on_lost: Callable[[object], None] | None = None,
) -> ShardedEngine:
    """Become rank 0 of `place.world` ranks: start this host's others, wait for those elsewhere, load the model.

    Call it in the main thread. `threads`: cores that each rank of this host computes with. `timeout_s`: how long ranks
    wait for each other. `preparation`: how passes are computed. `on_lost` is called if a rank dies or falls out of
    step; without it the process exits then.
    """
    on_lost = on_lost or _exit
    store, place = listen(place, timeout_s)
    processes = RankProcesses(place, first=1, threads=threads, on_death=on_lost)
    device = device_of(place)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    group = RankGroup(place, device, timeout_s, store)
    preparation = preparation or Preparation()
    serve = {"source": source, "dtype": str(dtype).removeprefix("torch."), "preparation": asdict(preparation)}
    group.tell(Message("serve", serve))
    base = load_spread(source, dtype, group)
    at_once = prepare(base, preparation)
    logger.info("ranks_ready", ranks=place.world, here=place.local_world, device=str(device))
    return ShardedEngine(
        base,
        group,
        micro_batch_tokens=min(micro_batch_tokens, at_once or sys.maxsize),
        on_lost=on_lost,
        before_end=processes.expect_end,
        after_end=processes.end,
    )


def follow(place: Placement, *, threads: int, timeout_s: float) -> None:
    """Be a rank that is not the first, until rank 0 says stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 finishes what it computes, then it says stop
    prepare_process()
    torch.set_num_threads(threads)
    group = RankGroup(place, device_of(place), timeout_s)
    serve = group.hear().fields
    base = load_spread(serve["source"], getattr(torch, serve["dtype"]), group)
    prepare(base, Preparation(**serve["preparation"]))
    Follower(base, group).run()
    group.close()


def device_of(place: Placement) -> torch.device:
    """The device of a rank: that of its number on its host, or the CPU where there is no CUDA. Raises BadPlacement."""
    count = torch.cuda.device_count()
    if not count:
        return torch.device("cpu")
    if place.local_world > count:
        raise BadPlacement(f"{place.local_world} ranks on a host that shows {count} CUDA devices")
    return torch.device("cuda", place.local)


def _exit(why: object) -> NoReturn:
    """Ranks that are out of step cannot go on; the runs' leases expire, and another worker takes them."""
    logger.error("rank_lost", why=str(why))
    os._exit(LOST_EXIT_CODE)
