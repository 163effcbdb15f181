"""What durability costs steady training: `python -m bench.durability [--pairs 6]`.

A train loop in this process steps one run without a pause, on SQLite and a local folder, once with the default bounds
of snapshots and once with none, in turns. A turn is as many steps as need two snapshots with the bounds, and ends when
they are written. "Overhead": by how much a step takes longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from app.db import Database
from app.migrate import upgrade
from app.wire.types import Datum
from bench.loops import our_base
from bench.pairs import timed
from bench.save_stall import wide_base
from tests.unit.workers.train.train_lab import VOCAB, Client, Lab
from workers.metrics import SNAPSHOTS
from workers.model.base import BaseModel
from workers.model.tiny import make_model, make_tokenizer
from workers.train.bounds import NEAR, Bounds, Lag
from workers.train.loop import TrainLoop

TOKENS, DATUMS = 48, 8
PER_TURN = 2
"""Snapshots of a turn with bounds."""


def data() -> list[Datum]:
    """A batch for cross-entropy."""
    draw = np.random.default_rng(0)
    return [
        Datum(
            draw.integers(0, VOCAB, TOKENS).astype(np.int32),
            {"target_tokens": draw.integers(0, VOCAB, TOKENS), "weights": np.ones(TOKENS, np.float32)},
        )
        for _ in range(DATUMS)
    ]


def steps_of(lab: Lab, loop: TrainLoop, client: Client, bounds: Bounds, count: int) -> Callable[[], None]:
    """So many steps under these bounds."""
    batch = data()

    def turn() -> None:
        loop._residents._bounds = bounds
        loop._slots[client.model_id].lag = Lag()
        for _ in range(count):
            client.send(batch)
            client.optim_step()
            while loop.cycle():
                pass
        lab.write_snapshots(loop)

    return turn


def measure(name: str, base: BaseModel, rank: int, pairs: int) -> None:
    """Print one row."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        upgrade(f"sqlite:///{folder / 'tinworks.db'}")
        database = Database(f"sqlite:///{folder / 'tinworks.db'}")
        lab = Lab(database, folder)
        lab.base = base
        loop, client = lab.worker(), lab.client(rank=rank)
        lab.work(loop)
        bounds = Bounds.of(lab.settings)
        never = dataclasses.replace(bounds, operations=2**62, body_bytes=2**62, seconds=math.inf)
        start = time.perf_counter()
        steps_of(lab, loop, client, never, 20)()
        step_s = (time.perf_counter() - start) / 20
        count = math.ceil((PER_TURN + 0.1) * NEAR * bounds.seconds / step_s)
        before = SNAPSHOTS.labels("written")._value.get()
        found = timed(
            steps_of(lab, loop, client, bounds, count), steps_of(lab, loop, client, never, count), pairs=pairs
        )
        snapshots = SNAPSHOTS.labels("written")._value.get() - before
        slot = loop._slots[client.model_id]
        size_bytes = sum(path.stat().st_size for path in lab.blob_folder.rglob("*") if path.is_file())
        overhead, low, high = (100 * (1 / speed - 1) for speed in (found.median, found.high, found.low))
        print(
            f"{name}, rank {rank}: a step {found.theirs / count:.1f} ms; {snapshots:.0f} snapshots, the last in"
            f" {1e3 * slot.snapshot_cost_s:.0f} ms, {size_bytes / 1e6:.1f} MB in the store;"
            f" overhead {overhead:.1f} % [{low:.1f}, {high:.1f}]"
        )
        lab.close()
        database.dispose()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure("the tiny model", our_base(make_model(make_tokenizer()))[0], 8, args.pairs)
    measure("a wider one", wide_base(), 64, args.pairs)


if __name__ == "__main__":
    main()
