"""Usage of training, on both databases: counted once with the results, however often work is done or asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import OperationalError

from app.audit.models import AuditEntry
from app.billing import meter
from app.billing.models import Usage
from app.db import Database
from tests.unit.workers.train.train_lab import Client, Lab, fail_once, random_data
from workers.train import lease

TOKENS = 14
"""Of `random_data`."""


@pytest.fixture
def lab(database: Database, tmp_path: Path) -> Iterator[Lab]:
    made = Lab(database, tmp_path)
    yield made
    made.close()


def usage(lab: Lab, client: Client) -> dict[str, int]:
    query = (
        select(Usage.kind, func.sum(Usage.amount))
        .where(Usage.owner_id == client.owner_id, Usage.session_id == client.row.session_id)
        .where(Usage.base_model == "tiny")
        .group_by(Usage.kind)
    )
    with lab.database.read() as session:
        return {kind: int(amount) for kind, amount in session.execute(query)}


def saves(lab: Lab, client: Client) -> list[tuple[str, int]]:
    query = select(AuditEntry).where(AuditEntry.owner_id == client.owner_id).order_by(AuditEntry.id)
    with lab.database.read() as session:
        rows = [row for row in session.scalars(query) if row.event == "checkpoint_save"]
    return [(row.details["tinker_path"], row.details["seq_id"]) for row in rows]


def test_tokens_and_checkpoints_of_each_run_are_counted(lab: Lab) -> None:
    loop, one, other = lab.worker(), lab.client(), lab.client()
    one.train(1)
    one.send(random_data(2, (9, 5, 3)), forward_only=True)
    other.train(1)
    lab.work(loop)
    lab.work(loop)
    assert usage(lab, one) == {"training": TOKENS + 17}
    assert usage(lab, other) == {"training": TOKENS}
    kept, sampled = one.save("kept"), one.save_for_sampler(path="sampled")
    one.save_for_sampler(sampling_session_seq_id=0)
    lab.work(loop)
    assert usage(lab, one) == {"training": TOKENS + 17, "checkpoint": 2}
    path = f"tinker://{one.model_id}"
    assert saves(lab, one) == [(f"{path}/weights/kept", kept), (f"{path}/sampler_weights/sampled", sampled)]


def test_what_fails_is_not_counted(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.bad_forward_backward()
    client.save("kept")
    client.save("kept")  # the name is taken
    lab.work(loop)
    assert usage(lab, client) == {"checkpoint": 1}
    assert len(saves(lab, client)) == 1


def test_a_repeated_request_is_counted_once(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    seq = client.forward_backward(1)
    client.forward_backward(1, seq_id=seq)
    lab.work(loop)
    client.forward_backward(1, seq_id=seq)
    lab.work(loop)
    assert usage(lab, client) == {"training": TOKENS}


def test_a_replay_counts_nothing(lab: Lab) -> None:
    first, client = lab.worker(snapshot_operations=10_000), lab.client()
    client.train(1)
    client.train(2)
    client.save("kept")
    lab.work(first)
    before = usage(lab, client)
    assert before == {"training": 2 * TOKENS, "checkpoint": 1}
    lab.kill(first)
    client.forward_backward(3)
    lab.work(lab.worker())
    assert usage(lab, client) == before | {"training": 3 * TOKENS}
    assert len(saves(lab, client)) == 1


@pytest.mark.parametrize("place", ["finish", "advance"])
def test_a_commit_that_fails_counts_nothing_and_its_repetition_once(
    lab: Lab, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    client.forward_backward(1)
    fail_once(monkeypatch, place)
    with pytest.raises(OperationalError):
        loop.cycle()
    assert usage(lab, client) == {}
    lab.work(loop)
    assert usage(lab, client) == {"training": TOKENS}


def test_work_of_a_worker_that_was_overtaken_counts_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = lab.worker(), lab.worker()
    taken, kept = lab.client(rank=2), lab.client(rank=3)
    lab.work(slow)
    taken.forward_backward(1)
    kept.forward_backward(2)
    real = lease.advance

    def overtaken(session: object, **values: object) -> bool:
        return values["model_id"] != taken.model_id and real(session, **values)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(lease, "advance", overtaken)
        slow.cycle()
    assert (usage(lab, taken), usage(lab, kept)) == ({}, {"training": TOKENS})
    lab.expire(slow)
    lab.work(fast)
    assert (usage(lab, taken), usage(lab, kept)) == ({"training": TOKENS}, {"training": TOKENS})


def test_a_commit_of_many_runs_pays_one_statement(lab: Lab) -> None:
    loop, clients = lab.worker(), [lab.client() for _ in range(5)]
    lab.work(loop)
    for client in clients:
        client.train(1)
    statements: list[str] = []
    event.listen(lab.database.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    assert loop.cycle()
    assert len([text for text in statements if "usage" in text]) == 1
    statements.clear()
    for client in clients:
        client.optim_step(note=False)
    assert loop.cycle()
    assert not [text for text in statements if "usage" in text]
    assert all(usage(lab, client) == {"training": TOKENS} for client in clients)


def test_hours_begin_on_the_hour() -> None:
    hour = meter.this_hour()
    assert (hour.minute, hour.second, hour.microsecond) == (0, 0, 0)
