"""A tenant's storage quota: what it counts, what it refuses, what gives space back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from app.checkpoints import catalogue
from app.checkpoints.catalogue import Address
from app.checkpoints.models import Checkpoint, Reservation, Snapshot
from app.checkpoints.quota import NewName, reserve
from app.db import Database, utc_now
from app.errors import InvalidRequest
from app.runs.log import DONE, FAILED
from app.runs.models import Run
from tests.factories import add_checkpoint, add_owner, add_run, unique
from tests.integration.conftest import Api, running
from tests.unit.workers.train.train_lab import Client, Lab
from workers.train import snapshots


def size_of(lab: Lab, save: Callable[[Client], int]) -> int:
    """How large a snapshot of a fresh run is."""
    loop, client = lab.worker(), lab.client(rank=2)
    save(client)
    lab.work(loop)
    with lab.database.read() as session:
        return session.scalars(select(Snapshot.size_bytes).order_by(Snapshot.created_at.desc())).first() or 0


SAVES: dict[str, Callable[[Client, str], int]] = {
    "weights": lambda client, name: client.save(name),
    "sampler_weights": lambda client, name: client.save_for_sampler(path=name),
    "external_weights": lambda client, name: client._json(client.lab.service.save_weights_external, path=name),
}


@pytest.mark.parametrize("kind", SAVES)
def test_a_save_beyond_the_quota_fails_names_it_and_stores_nothing(each_lab: Lab, kind: str) -> None:
    lab = each_lab
    one = size_of(lab, lambda client: SAVES[kind](client, "probe"))
    loop = lab.worker(tenant_storage_bytes=2 * one + one // 2)
    client, other = lab.client(rank=2), lab.client(rank=2)
    first = SAVES[kind](client, "first")
    client.train(1)
    second = SAVES[kind](client, "second")
    client.train(2)
    lab.work(loop)
    assert [client.operation(number).state for number in (first, second)] == [DONE, DONE]
    stored = len(lab.blobs.list("snapshots"))
    third = SAVES[kind](client, "third")
    lab.work(loop)
    category, error = client.error(third)
    assert category == "user"
    assert "TINWORKS_TENANT_STORAGE_BYTES" in error and f"{2 * one + one // 2:,}" in error
    assert len(lab.blobs.list("snapshots")) == stored
    of_other = SAVES[kind](other, "first")
    lab.work(loop)
    assert other.operation(of_other).state == DONE
    catalogue.remove(lab.database, client.owner_id, Address(client.model_id, kind, "first"))
    fourth = SAVES[kind](client, "fourth")
    lab.work(loop)
    assert client.operation(fourth).state == DONE


def test_what_expires_and_what_is_replaced_counts_no_more(lab: Lab) -> None:
    one = size_of(lab, lambda client: client.save("probe"))
    loop, client = lab.worker(tenant_storage_bytes=one + one // 2), lab.client(rank=2)
    client.save("name")
    lab.work(loop)
    replaced = client.save("name", overwrite=True)
    lab.work(loop)
    assert client.operation(replaced).state == DONE
    with lab.database.write() as session:
        session.execute(update(Checkpoint).values(expires_at=utc_now() - timedelta(seconds=1)))
    again = client.save("other")
    lab.work(loop)
    assert client.operation(again).state == DONE


def test_two_names_of_the_same_weights_count_once_and_sessions_do_not_count(lab: Lab) -> None:
    one = size_of(lab, lambda client: client.save_for_sampler(path="probe"))
    loop, client = lab.worker(tenant_storage_bytes=one + one // 2), lab.client(rank=2)
    client.train(1)
    numbers = [client.save_for_sampler(sampling_session_seq_id=0)]
    numbers += [client.save_for_sampler(path=name) for name in ("first", "second")]
    client.train(2)
    numbers.append(client.save_for_sampler(sampling_session_seq_id=1))
    lab.work(loop)
    assert [client.operation(number).state for number in numbers] == [DONE] * 4
    beyond = client.save_for_sampler(path="third")
    lab.work(loop)
    assert client.error(beyond)[0] == "user"


def test_saves_of_several_workers_at_once_do_not_pass_the_quota_together(each_lab: Lab) -> None:
    """All are written before any is committed."""
    lab = each_lab
    one = size_of(lab, lambda client: client.save("probe"))
    loops = [lab.worker(tenant_storage_bytes=2 * one + one // 2) for _ in range(4)]
    clients = [lab.client(rank=2)]
    clients += [lab.client(rank=2, owner_id=clients[0].owner_id) for _ in loops[1:]]
    for loop, client in zip(loops, clients, strict=True):
        lab.restore(loop, client)
    for loop in loops:
        lab.work(loop)
    numbers = [client.save("name") for client in clients]
    for loop in loops:
        loop.cycle()
    for loop in loops:
        lab.write_files(loop)
    for loop in loops:
        lab.work(loop)
    states = [client.operation(number).state for client, number in zip(clients, numbers, strict=True)]
    assert sorted(states) == [DONE, DONE, FAILED, FAILED]
    assert reserved(lab) == {}


def reserved(lab: Lab) -> dict[str, int]:
    """Room that is taken by saves under way, by run."""
    with lab.database.read() as session:
        return {row.model_id: row.size_bytes for row in session.scalars(select(Reservation))}


def test_threads_that_count_at_once_see_each_other(postgres_url: str) -> None:
    database = Database(postgres_url)
    with database.write() as session:
        owner_id = add_owner(session).id
        runs = [add_run(session, owner_id).id for _ in range(8)]
    together = threading.Barrier(len(runs))

    def save(model_id: str) -> bool:
        together.wait(30)
        try:
            with database.write() as session:
                new = NewName(owner_id, model_id, "weights", "name")
                reserve(session, new, seq_id=1, snapshot_id=unique("s"), size_bytes=10, limit=35)
        except InvalidRequest:
            return False
        return True

    with ThreadPoolExecutor(len(runs)) as threads:
        assert sum(threads.map(save, runs)) == 3
    database.dispose()


def test_a_worker_that_dies_in_a_save_takes_no_room_from_its_repetition(lab: Lab) -> None:
    one = size_of(lab, lambda client: client.save("probe"))
    first, client = lab.worker(tenant_storage_bytes=one + one // 2), lab.client(rank=2)
    save = client.save("name")
    lab.restore(first, client)
    while not reserved(lab):
        first.cycle()
        lab.write_files(first)
    lab.kill(first)
    lab.work(lab.worker(tenant_storage_bytes=one + one // 2))
    assert client.operation(save).state == DONE
    assert reserved(lab) == {}


def test_room_that_nobody_came_back_for_is_free_after_an_hour(lab: Lab) -> None:
    client = lab.client(rank=2)
    new = NewName(client.owner_id, client.model_id, "weights", "name")
    with lab.database.write() as session:
        reserve(session, new, seq_id=1, snapshot_id="a", size_bytes=10, limit=15)
    with pytest.raises(InvalidRequest, match="your others have 10"), lab.database.write() as session:
        reserve(session, new, seq_id=2, snapshot_id="b", size_bytes=10, limit=15)
    with lab.database.write() as session:
        session.execute(update(Reservation).values(created_at=utc_now() - timedelta(hours=1, seconds=1)))
        reserve(session, new, seq_id=2, snapshot_id="b", size_bytes=10, limit=15)
        assert session.scalars(select(Reservation.seq_id)).all() == [2]


def test_a_save_that_cannot_be_stored_gives_its_room_back(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client = lab.worker(tenant_storage_bytes=10**9), lab.client(rank=2)

    def full(*_: object) -> None:
        assert reserved(lab)
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "write", full)
        save = client.save("name")
        lab.work(loop)
    assert client.error(save)[0] == "server"
    assert reserved(lab) == {}


@pytest.fixture
def small(configure: Callable[..., None], database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """The service with a quota of 100 bytes."""
    with running(configure, database_url, redis_url, tmp_path, tenant_storage_bytes=100) as service:
        yield service


def test_a_copy_counts_for_whom_it_is_made(small: Api) -> None:
    paths = []
    for size_bytes in (60, 50):
        model_id = small.run("bob")
        with small.database.write() as session:
            run = session.get_one(Run, model_id)
            add_checkpoint(session, run, public=True, size_bytes=size_bytes)
        paths.append(f"tinker://{model_id}/weights/first")
    answers = [small.post("copy_weights", {"source_path": path, "destination_project_id": "p"}) for path in paths]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert answers[1].json()["detail"].startswith("source_path: the checkpoint has 50 bytes and your others have 60")
    with small.database.read() as session:
        assert session.scalar(select(func.count(Checkpoint.id))) == 3
