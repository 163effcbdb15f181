"""A client that was silent for ten minutes, a laptop that slept, comes back: its run goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from app.db import get_database, utc_now
from app.runs.log import DONE
from app.sessions.models import ClientSession
from app.sessions.service import heartbeat
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, state_of
from workers import janitor

SILENCE = timedelta(minutes=10)


@pytest.fixture
def lab(
    configure: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    database_url: str,
    redis_url: str,
    tmp_path: Path,
) -> Iterator[Lab]:
    """On the database that this process's janitor tidies, which has seen the service up for an hour."""
    monkeypatch.setattr(janitor, "_up_for_s", lambda settings: 3600.0)
    configure(DATABASE_URL=database_url, REDIS_URL=redis_url, TINWORKS_DATA_DIR=tmp_path)
    made = Lab(get_database(), tmp_path)
    yield made
    made.close()


def pass_silently(lab: Lab, client: Client) -> None:
    """Ten minutes in which nothing was heard of the client, and the janitor came by twice."""
    with lab.database.write() as session:
        session.get_one(ClientSession, client.row.session_id).last_seen_at = utc_now() - SILENCE
    for _ in range(2):
        janitor.tidy()


def silent_since(lab: Lab, client: Client) -> object:
    with lab.database.read() as session:
        return session.get_one(ClientSession, client.row.session_id).silent_since


@pytest.mark.parametrize("first", ["heartbeat", "request"])
def test_a_session_that_was_silent_for_ten_minutes_goes_on(lab: Lab, first: str) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    client.forward_backward(2)
    lab.work(loop)
    pass_silently(lab, client)
    assert silent_since(lab, client) is not None
    loop._residents.evict_abandoned()
    assert residents(loop) == set() and client.row.worker_id is None
    if first == "heartbeat":
        heartbeat(lab.database, client.owner_id, client.row.session_id)
    step = client.optim_step()
    assert silent_since(lab, client) is None
    other = lab.worker()
    lab.work(other)
    assert client.operation(step).state == DONE
    assert_close(state_of(other, client), client.alone)
