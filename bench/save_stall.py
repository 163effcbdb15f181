"""How long a save holds up the train loop: `python -m bench.save_stall [--saves 20] [--put-ms 30]`.

A train loop in this process, with a blob store that takes so long for each write, as an object store does. Per save for
samplers, of a tiny adapter and of one of 8 MB: how long the loop stands still for it, which is the copy to host memory
(its only part that depends on the size) and the bookkeeping of two cycles; how long until the save is done for its
client. Once without and once with a folder that trainers and samplers share. "In the loop": what the loop would stand
still for if it made the files itself and wrote them to the blob store.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.db import Database
from app.migrate import upgrade
from app.storage.blobs import LocalBlobStore
from tests.unit.workers.train.train_lab import Client, Lab
from workers.model.adapter import HostCopy
from workers.model.base import BaseModel
from workers.train import snapshots
from workers.train.loop import TrainLoop

WARM_UP = 2


class SlowBlobs(LocalBlobStore):
    """A blob store behind a network."""

    def __init__(self, root: Path, put_ms: float) -> None:
        super().__init__(root)
        self._put_s = put_ms / 1e3

    def put(self, key: str, data: bytes) -> None:
        time.sleep(self._put_s)
        super().put(key, data)


def wide_base() -> BaseModel:
    """A model on which adapters have 80 KB per rank."""
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=768,
        vocab_size=97,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return BaseModel(Qwen3ForCausalLM(config).eval(), "tiny")


def turn(loop: TrainLoop) -> float:
    """Seconds of the cycles until there is nothing to do but wait."""
    start = time.perf_counter()
    while loop.cycle():
        pass
    return time.perf_counter() - start


def idle(loop: TrainLoop) -> float:
    """Seconds of a cycle that finds nothing."""
    return float(np.median([turn(loop) for _ in range(20)]))


def save_once(lab: Lab, loop: TrainLoop, client: Client, number: int) -> tuple[float, float]:
    """Seconds that the loop stood still for a save, and until it was done."""
    client.train(number)
    lab.work(loop)
    nothing = idle(loop)
    client.save_for_sampler(sampling_session_seq_id=number, kind="inflight")
    begin = time.perf_counter()
    stalled = turn(loop) - nothing
    lab.write_files(loop)
    stalled += turn(loop) - nothing
    return stalled, time.perf_counter() - begin


def measure(base: BaseModel, rank: int, saves: int, put_ms: float, *, shared: bool) -> None:
    """Print one row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        upgrade(f"sqlite:///{folder / 'tinworks.db'}")
        database = Database(f"sqlite:///{folder / 'tinworks.db'}")
        lab = Lab(database, folder, snapshot_operations=10_000, shared_dir=folder / "shared" if shared else None)
        lab.base, lab.blobs = base, SlowBlobs(lab.blob_folder, put_ms)
        loop, client = lab.worker(), lab.client(rank=rank)
        lab.work(loop)
        times = [save_once(lab, loop, client, i) for i in range(saves + WARM_UP)][WARM_UP:]
        state = loop._slots[client.model_id].state
        assert state is not None
        copies, writes = [], []
        for _ in range(5):
            start = time.perf_counter()
            copy = HostCopy(state.adapter)
            middle = time.perf_counter()
            files = snapshots.adapter_files(copy, base)
            snapshots.write(lab.blobs, files)
            copies.append(middle - start)
            writes.append(time.perf_counter() - middle)
        stalls, dones = (1e3 * np.asarray(column) for column in zip(*times, strict=True))
        print(
            f"{files.size_bytes / 1e6:6.2f} MB  {'shared folder' if shared else 'blob store   '}"
            f"  loop stands still {np.median(stalls):6.2f} ms (p95 {np.percentile(stalls, 95):6.2f}),"
            f" of it copy {1e3 * np.median(copies):5.2f} ms;"
            f"  in the loop {1e3 * np.median(writes):6.1f} ms;  done after {np.median(dones):6.1f} ms"
        )
        lab.close()
        database.dispose()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--put-ms", type=float, default=30.0, help="of one write to the blob store")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = wide_base()
    for rank in (1, 100):
        for shared in (False, True):
            measure(base, rank, args.saves, args.put_ms, shared=shared)


if __name__ == "__main__":
    main()
