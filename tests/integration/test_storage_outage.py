"""The blob store is away: clients are told so by name and may try again, and nothing that was accepted is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from app.errors import StorageUnavailable
from app.main import create_app
from app.runs.log import ACCEPTED, DONE, FAILED
from app.runs.models import Operation
from app.storage.blobs import BlobStore
from tests.integration.conftest import Api, running
from tests.unit.workers.train.train_lab import Lab, assert_close, random_data, state_of

LARGE = tuple(range(1, 30))


class AwayStore:
    """A blob store that cannot be reached, for whatever is done below some folders while `away` is set."""

    def __init__(self, store: BlobStore, *folders: str) -> None:
        self._store, self._folders, self.away, self.refused = store, folders, True, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def call(key: str, *args: Any, **options: Any) -> Any:
            if self.away and key.startswith(self._folders):
                self.refused += 1
                raise StorageUnavailable("it cannot be reached")
            return real(key, *args, **options)

        return call


def test_a_save_fails_with_the_reason_and_the_next_one_succeeds(lab: Lab) -> None:
    lab.blobs = store = AwayStore(lab.blobs, "snapshots")  # type: ignore[assignment]
    loop, client = lab.worker(), lab.client()
    client.train(1)
    named, session = client.save("name"), client.save_for_sampler(sampling_session_seq_id=0)
    client.train(2)
    lab.work(loop)
    for number in (named, session):
        category, error = client.error(number)
        assert category == "server"
        assert "the blob store cannot be used: it cannot be reached" in error
    store.away = False
    again = client.save("name")
    lab.work(loop)
    assert client.operation(again).state == DONE
    assert_close(state_of(loop, client), client.alone)


def test_a_result_that_cannot_be_stored_fails_its_operation_alone_with_the_reason(each_lab: Lab) -> None:
    """What its run did before it in the same pass stays, what came after is done without it, others notice nothing."""
    loop, client, other = each_lab.worker(inline_bytes=1024), each_lab.client(rank=2), each_lab.client(rank=3)
    each_lab.work(loop)
    loop._committer._blobs = store = AwayStore(each_lab.blobs, "results")  # type: ignore[assignment]
    before = client.forward_backward(1)
    bad = client.send(random_data(2, [60] * 8))
    after, step = client.train(3)
    _, other_step = other.train(4)
    assert loop.cycle()
    assert [client.operation(seq).state for seq in (before, bad, after)] == [DONE, FAILED, ACCEPTED]
    assert other.operation(other_step).state == DONE
    each_lab.work(loop)
    assert store.refused == 1
    assert client.error(bad) == (
        "server",
        "forward_backward: the blob store cannot be used: it cannot be reached; try again later",
    )
    assert client.operation(after).state == DONE
    assert client.metrics(step)["failed_operations"] == 1
    for one in (client, other):
        assert_close(state_of(loop, one), one.alone)
        assert (one.row.crash_count, one.row.applied_seq) == (0, one.next_seq - 1)
    store.away = False
    good = client.send(random_data(2, [60] * 8))
    each_lab.work(loop)
    assert client.operation(good).result_blob is not None


def test_a_result_that_was_not_stored_has_no_effect_on_the_next_worker_either(lab: Lab) -> None:
    loop, client = lab.worker(inline_bytes=1024), lab.client()
    client.train(1)
    lab.work(loop)
    loop._committer._blobs = AwayStore(lab.blobs, "results")  # type: ignore[assignment]
    client.send(random_data(2, [60] * 8))
    client.forward_backward(3)
    lab.work(loop)
    live = state_of(loop, client)
    lab.kill(loop)
    second = lab.worker()
    lab.restore(second, client)
    assert state_of(second, client).same_bits(live)


def test_bodies_that_cannot_be_read_wait_and_keep_nobody_else_waiting(lab: Lab) -> None:
    lab.settings.inline_bytes = 512
    loop, client, other = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    lab.work(loop)
    loop._blobs = store = AwayStore(lab.blobs, "bodies")  # type: ignore[assignment]
    small = client.optim_step(note=False)
    large = client.send(random_data(1, [60] * 3))
    step = client.optim_step(note=False)
    other.train(2)
    slot = loop._slots[client.model_id]
    assert not loop.cycle()
    lab.work(loop)
    assert store.refused == 1
    states = [client.operation(number).state for number in (small, large, step)]
    assert states == [DONE, ACCEPTED, ACCEPTED]
    assert_close(state_of(loop, other), other.alone)
    assert loop._slots[client.model_id] is slot and client.row.crash_count == other.row.crash_count == 0
    store.away, loop._bodies_again = False, 0.0
    lab.work(loop)
    assert [client.operation(number).state for number in (large, step)] == [DONE, DONE]


def test_a_recovery_snapshot_that_cannot_be_stored_fails_nothing_and_is_made_later(lab: Lab) -> None:
    lab.settings.snapshot_operations = 2
    lab.blobs = store = AwayStore(lab.blobs, "snapshots")  # type: ignore[assignment]
    loop, client = lab.worker(), lab.client()
    for number in (1, 2):
        client.train(number)
        lab.work(loop)
        lab.write_snapshots(loop)
    assert store.refused and client.row.recovery_snapshot_id is None
    assert client.row.applied_seq == client.next_seq - 1
    assert loop.snapshot_lag().operations == client.next_seq
    store.away = False
    client.train(3)
    lab.work(loop)
    lab.write_snapshots(loop)
    assert client.row.recovery_snapshot_id is not None
    lab.kill(loop)
    second = lab.worker()
    client.train(4)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_a_load_that_cannot_be_read_fails_with_the_reason(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("name")
    lab.work(loop)
    lab.blobs = AwayStore(lab.blobs, "snapshots")  # type: ignore[assignment]
    lab.kill(loop)
    other = lab.worker()
    number = client.load(f"tinker://{client.model_id}/weights/name", optimizer=True)
    lab.work(other)
    category, error = client.error(number)
    assert category == "server"
    assert "it cannot be reached" in error


@pytest.fixture
def away(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> Iterator[tuple[Api, AwayStore]]:
    """The service with small inline bodies, over a store that goes away."""
    with running(configure, sqlite_url, redis_url, tmp_path, inline_bytes=64) as api:
        services = api.client.app.state.services  # type: ignore[attr-defined]
        store = AwayStore(services.runs._blobs, "bodies", "results", "snapshots")
        store.away = False
        services.runs._blobs = services.runs._bodies.blobs = services.futures._blobs = services.downloads.blobs = store
        yield api, store


def test_a_training_request_is_answered_503_and_consumes_nothing(
    away: tuple[Api, AwayStore], batch: Callable[..., bytes]
) -> None:
    api, store = away
    model_id = api.run()
    body = batch(model_id, 1, *LARGE)
    store.away = True
    answer = api.forward_backward(body)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["detail"] == "the blob store cannot be used: it cannot be reached; try again later"
    store.away = False
    assert api.forward_backward(body).status_code == 200
    assert api.operation(model_id, 1).body_blob is not None


def test_polls_wait_for_the_store_to_come_back(away: tuple[Api, AwayStore], batch: Callable[..., bytes]) -> None:
    api, store = away
    model_id = api.run()
    api.forward_backward(batch(model_id, 1, *LARGE))
    store.put("results/x", b"result")
    api.finish(model_id, 1, kind="proto")
    with api.database.write() as session:
        session.execute(update(Operation).where(Operation.seq_id == 1).values(result=None, result_blob="results/x"))
    store.away = True
    assert api.poll(f"{model_id}:1").status_code == 408
    store.away = False
    assert api.poll(f"{model_id}:1").content == b"result"


def test_create_app_asks_nothing_of_a_bucket(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service whose bucket is away starts, and says so where it is needed."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    configure(
        DATABASE_URL=sqlite_url,
        REDIS_URL=redis_url,
        TINWORKS_S3_BUCKET="away",
        TINWORKS_S3_ENDPOINT_URL="http://127.0.0.1:9",
    )
    assert create_app()


def test_a_load_that_cannot_be_repeated_now_is_repeated_later(lab: Lab) -> None:
    """A run that began as a checkpoint is rebuilt from it. While the store is away it only waits."""
    first, source = lab.worker(), lab.client()
    source.train(1)
    source.save("begin")
    lab.work(first)
    path = f"tinker://{source.model_id}/weights/begin"
    client = lab.client_from(path, owner_id=source.owner_id, optimizer=True)
    client.train(2)
    lab.work(first)
    lab.kill(first)
    lab.blobs = store = AwayStore(lab.blobs, "snapshots")  # type: ignore[assignment]
    second = lab.worker()
    step = client.optim_step()
    for _ in range(5):
        second.cycle()
    assert store.refused and client.operation(step).state == ACCEPTED
    assert client.row.crash_count <= 1 and client.row.worker_id is None  # the death itself counts
    store.away = False
    lab.work(second)
    assert client.operation(step).state == DONE
