"""The meter on both databases: amounts add up, in one statement, whoever adds at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import event, select

from app.billing import meter
from app.billing.meter import Meter
from app.billing.models import Usage
from app.db import Database
from app.wire.sampling import StoredSample
from app.wire.types import SampledSequence, SampleRequest, SampleResult, SamplingParams
from tests import factories
from workers.sample.usage import SampleUsage

HOUR = meter.this_hour()


@pytest.fixture
def owner_id(database: Database) -> str:
    with database.write() as session:
        return factories.add_owner(session).id


def amounts(database: Database) -> dict[tuple[str, str], int]:
    with database.read() as session:
        return {(row.session_id, row.kind): row.amount for row in session.scalars(select(Usage))}


def add(database: Database, counts: dict[Meter, int]) -> None:
    with database.write() as session:
        meter.add(session, counts)


def test_amounts_of_one_hour_add_up_and_those_of_others_do_not(database: Database, owner_id: str) -> None:
    now, before = (
        Meter(owner_id, HOUR, "s", "m", "training"),
        Meter(owner_id, HOUR - timedelta(hours=1), "s", "m", "training"),
    )
    add(database, {now: 5, before: 100})
    add(database, {now: 2**40})
    with database.read() as session:
        rows = session.execute(select(Usage.hour, Usage.amount).order_by(Usage.hour)).all()
    assert [tuple(row) for row in rows] == [(before.hour, 100), (now.hour, 2**40 + 5)]


def test_however_much_is_counted_it_is_one_statement_and_nothing_is_none(database: Database, owner_id: str) -> None:
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    add(database, {})
    assert not [statement for statement in statements if "usage" in statement]
    add(database, {Meter(owner_id, HOUR, f"s{i}", "m", "training"): i + 1 for i in range(50)})
    assert len([statement for statement in statements if "usage" in statement]) == 1
    assert sum(amounts(database).values()) == 50 * 51 // 2


def test_what_is_rolled_back_is_not_counted(database: Database, owner_id: str) -> None:
    with pytest.raises(ZeroDivisionError), database.write() as session:
        meter.add(session, {Meter(owner_id, HOUR, "s", "m", "training"): 1})
        raise ZeroDivisionError
    assert amounts(database) == {}


def test_nothing_is_lost_between_writers_of_the_same_rows(database: Database, owner_id: str) -> None:
    meters = [Meter(owner_id, HOUR, f"s{i}", "m", "sample") for i in range(4)]

    def work(turn: int) -> None:
        order = meters[turn % 4 :] + meters[: turn % 4]  # another one first each time
        for _ in range(10):
            add(database, dict.fromkeys(order, 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert amounts(database) == {(f"s{i}", "sample"): 40 for i in range(4)}


def sample(owner_id: str, prompt: int) -> StoredSample:
    request = SampleRequest("s:sample:0:0", [1] * prompt, SamplingParams())
    return StoredSample(owner_id, "s", "pool", None, request, "tiny")


def result(*lengths: int, cached: int = 0) -> SampleResult:
    sequences = [SampledSequence("length", [1] * n, [0.0] * n) for n in lengths]  # type: ignore[arg-type]
    return SampleResult(sequences, prompt_cache_hit_tokens=cached)


def test_samples_are_counted_when_they_are_delivered_and_failures_are_not(database: Database, owner_id: str) -> None:
    usage, delivered = SampleUsage(database), []
    for outcome in (result(3, 4, cached=6), result(1), ValueError("no")):
        usage.counted(sample(owner_id, 10), delivered.append)(outcome)
    assert len(delivered) == 3
    assert amounts(database) == {}
    usage.write()
    expected = {("s", "prefill"): 14, ("s", "prefill_cached"): 6, ("s", "sample"): 8}
    assert amounts(database) == expected
    usage.write()
    assert amounts(database) == expected


def test_what_cannot_be_written_is_written_later(database: Database, owner_id: str) -> None:
    usage = SampleUsage(database)
    usage.count(sample("nobody", 10), result(3))  # no such owner: the database refuses
    usage.write()
    assert amounts(database) == {}
    with database.write() as session:
        factories.add_owner(session, id="nobody")
    usage.start()
    usage.stop(10)
    assert amounts(database) == {("s", "prefill"): 10, ("s", "sample"): 3}
