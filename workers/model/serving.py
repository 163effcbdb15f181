"""Which engine a worker gets: from its roles, its settings and, on several hosts, torch's rendezvous variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import torch

from app.settings import Settings
from workers.model.base import BaseModel
from workers.model.engine import Engine, SoloEngine
from workers.model.preparation import CannotPrepare, Preparation, prepare
from workers.model.ranks.placement import BadPlacement, placement


def pin_devices(settings: Settings) -> None:
    """Let this process and those that it starts see the CUDA devices of its settings alone. Call it before CUDA is
    used.
    """
    if settings.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.gpus


def load_engine(roles: Sequence[str], settings: Settings, *, source: str, threads: Mapping[str, int]) -> Engine:
    """The base model `source`, loaded, by all ranks of the worker if it trains on several. Call it in the main thread.

    `threads`: cores of each role; several ranks share those of `train`. Raises SystemExit if the worker cannot be what
    it was asked to be.
    """
    pin_devices(settings)
    preparation = Preparation(settings.attention, settings.gradient_checkpointing)
    dtype: torch.dtype | None = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        place = placement(os.environ, settings.local_ranks) if "train" in roles else None
        if place is None or place.world == 1:
            base = BaseModel.load(source, dtype=dtype)
            at_once = prepare(base, preparation) if "train" in roles else None
            return SoloEngine(base, micro_batch_tokens=min(settings.micro_batch_tokens, at_once or sys.maxsize))
        if "sample" in roles:
            raise BadPlacement(
                f"a worker of {place.world} ranks cannot sample, since none of them has the whole model: start one "
                "with -Q train and another with -Q sample"
            )
        if place.rank != 0:
            raise BadPlacement(
                f"RANK is {place.rank}: the worker is rank 0; on other hosts start `python -m workers.model.ranks`"
            )
        from workers.model.ranks.start import lead

        return lead(
            place,
            source=source,
            dtype=dtype,
            micro_batch_tokens=settings.micro_batch_tokens,
            threads=max(1, threads["train"] // place.local_world),
            timeout_s=2 * settings.max_pass_s,
            preparation=preparation,
        )
    except (BadPlacement, CannotPrepare) as error:
        raise SystemExit(str(error)) from error
