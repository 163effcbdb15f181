"""Exports that go through the log: what is written, to whom it is readable, and that the run does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyrage
import pytest
import torch
from sqlalchemy import func, select

from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.service import snapshot_folder
from app.db import utc_now
from app.runs.log import DONE
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, state_of
from workers.model.export import load_peft
from workers.train import snapshots

FILES = {"adapter_config.json", "adapter_model.safetensors"}


def export(client: Client, name: str = "out", **fields: Any) -> int:
    return client._json(client.lab.service.save_weights_external, path=name, **fields)


def folder_of(lab: Lab, client: Client, name: str = "out") -> Path:
    return lab.blob_folder / snapshot_folder(lab.snapshot_of(client, "external_weights", name))


def test_an_export_holds_the_weights_at_its_place_in_the_sequence(each_lab: Lab) -> None:
    lab = each_lab
    loop, client = lab.worker(), lab.client()
    client.train(1)
    client.forward_backward(2)
    done = export(client, ttl_seconds=3600)
    client.train(3)
    lab.work(loop)
    result = client.result(done)
    files = snapshots.read(lab.blobs, lab.snapshot_of(client, "external_weights", "out"))
    assert files.keys() == FILES
    path = f"tinker://{client.model_id}/external_weights/out"
    size = sum(map(len, files.values()))
    assert result == {"path": path, "size_bytes": size, "type": "save_weights_external"}
    assert orjson.loads(files["adapter_config.json"])["base_model_name_or_path"] == "tiny"
    early = lab.client()
    early.train(1)
    lab.work(loop)
    assert torch.equal(load_peft(lab.base, files).flat, state_of(loop, early).flat)
    assert_close(state_of(loop, client), client.alone)
    with lab.database.read() as session:
        row, snapshot = session.scalars(select(Checkpoint)).one(), session.scalars(select(Snapshot)).one()
    assert (row.kind, snapshot.kind, snapshot.size_bytes) == ("external_weights", "external", size)
    assert row.expires_at is not None and 3500 < (row.expires_at - utc_now()).total_seconds() <= 3600


def test_an_encrypted_export_stores_nothing_that_can_be_read_without_a_key(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    keys = [pyrage.x25519.Identity.generate() for _ in range(2)]
    export(client, "plain")
    sealed = export(client, "sealed", age_encryption_recipients=[str(key.to_public()) for key in keys])
    lab.work(loop)
    plain = folder_of(lab, client, "plain")
    folder = folder_of(lab, client, "sealed")
    assert {path.name for path in folder.iterdir()} == {f"{name}.age" for name in FILES} | {"manifest.json"}
    for name in FILES:
        for key in keys:
            assert pyrage.decrypt((folder / f"{name}.age").read_bytes(), [key]) == (plain / name).read_bytes()
    assert client.result(sealed)["size_bytes"] == sum((folder / f"{name}.age").stat().st_size for name in FILES)


def test_a_recipient_that_is_no_key_fails_the_export_and_nothing_is_written(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    done = export(client, age_encryption_recipients=["age1nobody"])
    client.train(1)
    lab.work(loop)
    category, error = client.error(done)
    assert category == "user" and error.startswith("age_encryption_recipients.0: ")
    with lab.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Snapshot)) == 0
    assert_close(state_of(loop, client), client.alone)


def test_a_name_is_used_once_until_it_is_deleted(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("out")
    first, again = export(client), export(client)
    lab.work(loop)
    assert client.operation(first).state == DONE
    category, error = client.error(again)
    assert category == "user" and "external_weights/out already; delete it" in error
    with lab.database.write() as session:
        session.delete(session.scalars(select(Checkpoint).where(Checkpoint.kind == "external_weights")).one())
    third = export(client)
    lab.work(loop)
    assert client.operation(third).state == DONE


def test_an_export_is_not_made_again_by_a_replay(lab: Lab) -> None:
    first, client = lab.worker(), lab.client()
    client.train(1)
    export(client)
    lab.work(first)
    before = lab.snapshot_of(client, "external_weights", "out")
    lab.kill(first)
    second = lab.worker()
    client.train(2)
    lab.work(second)
    assert lab.snapshot_of(client, "external_weights", "out") == before
    with lab.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Snapshot)) == 1
    assert_close(state_of(second, client), client.alone)


def test_an_export_that_cannot_write_fails_and_names_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client = lab.worker(), lab.client()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "write", full)
        done = export(client)
        lab.work(loop)
    assert client.error(done)[0] == "server"
    with lab.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Checkpoint)) == 0
