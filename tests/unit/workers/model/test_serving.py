"""A worker that cannot be what it was asked to be says so before it loads anything."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from app.settings import Settings
from workers.model.serving import load_engine, pin_devices

THREADS = {"train": 1, "sample": 1}
RENDEZVOUS = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("roles", "ranks", "changed", "words"),
    [
        (("train", "sample"), 2, None, "a worker of 2 ranks cannot sample, .* start one with -Q train and another"),
        (("train", "sample"), 1, {}, "a worker of 2 ranks cannot sample"),
        (("train",), 1, {"RANK": "1"}, "RANK is 1: the worker is rank 0; on other hosts start"),
        (("train",), 3, {}, "the 3 ranks of this host do not fit into WORLD_SIZE 2"),
        (("train",), 1, {"RANK": "first"}, "RANK must be a number, got 'first'"),
    ],
)
def test_a_start_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, roles: Sequence[str], ranks: int, changed: dict[str, str] | None, words: str
) -> None:
    for name, value in ({} if changed is None else RENDEZVOUS | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=words):
        load_engine(roles, Settings(train_ranks=ranks), source="nowhere", threads=THREADS)


def test_a_worker_sees_the_devices_of_its_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    pin_devices(Settings(gpus=""))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    pin_devices(Settings(gpus="2, 3"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
