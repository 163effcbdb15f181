"""A worker that could not tell the fleet that it is there tries again, or ends."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import OperationalError

from app.errors import StorageUnavailable
from workers import process


class Worker:
    """Cannot announce itself as long as there are errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.is_known = False

    def announce(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.is_known = True


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_ANNOUNCE_AGAIN_S", 0.0)


def current(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> Worker:
    worker = Worker(*errors)
    monkeypatch.setattr(process, "_current", worker)
    return worker


def test_an_outage_only_delays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    away = OperationalError("select 1", {}, ConnectionError("refused"))
    worker = current(monkeypatch, away, StorageUnavailable("the bucket does not answer"), away)
    process.announce()
    assert worker.is_known


def test_a_worker_that_is_to_end_tries_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    away = OperationalError("select 1", {}, ConnectionError("refused"))
    worker = current(monkeypatch, *[away] * 5)
    process.announce(unless=lambda: len(worker.errors) < 4)
    assert not worker.is_known and len(worker.errors) == 3


def test_what_no_waiting_mends_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current(monkeypatch, ValueError("no tokenizer"))
    with pytest.raises(SystemExit, match="no tokenizer"):
        process.announce()
