"""An audit that the database keeps by itself, SQLite or Postgres: every change of an operation's state and result, and
of a run's position and epoch.

Triggers write it in the transaction that they watch, so it holds what was committed, by whomever, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import text

from app.db import Database
from app.runs.log import ACCEPTED, DONE, FAILED

_TABLE = "CREATE TABLE audit ({id}, model_id TEXT, what TEXT, seq_id INTEGER, before TEXT, after TEXT)"
_ID = {
    "sqlite": "id INTEGER PRIMARY KEY",
    "postgres": "id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
}
_FORGOTTEN, _TOLD = "forgotten", "told"


@dataclass(frozen=True, slots=True)
class _Trigger:
    """`values`: of the columns of the audit, but for its id."""

    name: str
    event: str
    values: str
    when: str = "TRUE"

    def statements(self, *, is_sqlite: bool) -> Iterator[str]:
        insert = f"INSERT INTO audit (model_id, what, seq_id, before, after) VALUES ({self.values});"
        if is_sqlite:
            yield f"CREATE TRIGGER {self.name} AFTER {self.event} WHEN {self.when} BEGIN {insert} END"
            return
        yield (
            f"CREATE FUNCTION {self.name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {insert} RETURN NULL; END $$"
        )
        yield (
            f"CREATE TRIGGER {self.name} AFTER {self.event} FOR EACH ROW WHEN ({self.when}) "
            f"EXECUTE FUNCTION {self.name}()"
        )


_TRIGGERS = (
    _Trigger(
        "audit_arrivals",
        "INSERT ON operations",
        "NEW.model_id, 'state', NEW.seq_id, NULL, NEW.state",
    ),
    _Trigger(
        "audit_states",
        "UPDATE OF state ON operations",
        "NEW.model_id, 'state', NEW.seq_id, OLD.state, NEW.state",
    ),
    _Trigger(
        "audit_results",
        "UPDATE OF result, result_blob, result_kind, error, error_category ON operations",
        "NEW.model_id, 'result', NEW.seq_id, NULL, CASE WHEN NEW.result IS NULL AND NEW.result_blob IS NULL "
        f"AND NEW.result_kind IS NULL AND NEW.error IS NULL THEN '{_FORGOTTEN}' ELSE '{_TOLD}' END",
        f"OLD.state <> '{ACCEPTED}'",
    ),
    _Trigger(
        "audit_positions",
        "UPDATE OF applied_seq ON runs",
        "NEW.id, 'position', NULL, OLD.applied_seq, NEW.applied_seq",
    ),
    _Trigger(
        "audit_epochs",
        "UPDATE OF epoch ON runs",
        "NEW.id, 'epoch', NULL, OLD.epoch, NEW.epoch",
    ),
)


class _Entry(NamedTuple):
    what: str
    seq_id: int | None
    before: str | None
    after: str


def begin(database: Database) -> None:
    """Audit from now on; the runs that are looked at later begin after this."""
    with database.write() as session:
        session.execute(text(_TABLE.format(id=_ID["sqlite" if database.is_sqlite else "postgres"])))
        for trigger in _TRIGGERS:
            for statement in trigger.statements(is_sqlite=database.is_sqlite):
                session.execute(text(statement))


def violations(database: Database, model_id: str, last: int, *, may_forget: bool = False) -> list[str]:
    """What has happened to a run that may not, in words. Nothing, if operations 0 to `last` have taken effect: each
    once, in their order, and none was told again or otherwise. `may_forget`: whether results may have been pruned."""
    with database.read() as session:
        query = text("SELECT what, seq_id, before, after FROM audit WHERE model_id = :model_id ORDER BY id")
        entries = [_Entry(*row) for row in session.execute(query, {"model_id": model_id})]
    return [
        *_wrong_states([one for one in entries if one.what == "state"], last),
        *_wrong_results([one for one in entries if one.what == "result"], may_forget=may_forget),
        *_wrong_moves([one for one in entries if one.what in ("position", "state")], last),
        *_wrong_epochs([one for one in entries if one.what == "epoch"]),
    ]


def assert_exactly_once(database: Database, model_id: str, last: int) -> None:
    """That nothing has happened to a run that may not."""
    assert not (wrong := violations(database, model_id, last)), wrong


def _wrong_states(entries: Iterable[_Entry], last: int) -> Iterator[str]:
    """Each operation arrives, and becomes finished once; one that fails on arrival is finished then. One after the
    last waits for those that are missing before it."""
    chains: dict[int, list[str]] = defaultdict(list)
    for one in entries:
        assert one.seq_id is not None
        chains[one.seq_id].append(one.after)
    for seq_id in sorted(chains.keys() | set(range(last + 1))):
        chain = chains[seq_id]
        if seq_id > last and chain not in ([ACCEPTED], [FAILED]):
            yield f"operation {seq_id} comes after the last one, {last}, and did not wait: {' → '.join(chain)}"
        elif seq_id <= last and chain not in ([ACCEPTED, DONE], [ACCEPTED, FAILED], [DONE], [FAILED]):
            yield f"operation {seq_id} was not finished exactly once: {' → '.join(chain) or 'it never came'}"


def _wrong_results(entries: Iterable[_Entry], *, may_forget: bool) -> Iterator[str]:
    """What a finished operation has told stays."""
    for one in entries:
        if one.after == _TOLD:
            yield f"the result of operation {one.seq_id} was written again after it was finished"
        elif not may_forget:
            yield f"the result of operation {one.seq_id} was forgotten"


def _wrong_moves(entries: Iterable[_Entry], last: int) -> Iterator[str]:
    """A position rises from where it was; what is finished then is what it has moved over, in order."""
    before = after = -1
    finished = -1
    for one in entries:
        if one.what == "position":
            assert one.before is not None
            if int(one.before) != after or int(one.after) <= int(one.before):
                yield f"the position went from {one.before} to {one.after}, after it had come to {after}"
            before, after = int(one.before), int(one.after)
        elif one.before == ACCEPTED and one.seq_id is not None:
            if not before < one.seq_id <= after:
                yield f"operation {one.seq_id} was finished when the position went from {before} to {after}"
            if one.seq_id <= finished:
                yield f"operation {one.seq_id} was finished after operation {finished}"
            finished = one.seq_id
    if after != last:
        yield f"the position came to {after}, not to {last}"


def _wrong_epochs(entries: Sequence[_Entry]) -> Iterator[str]:
    """An epoch rises from where it was."""
    epoch = 0
    for one in entries:
        assert one.before is not None
        if int(one.before) != epoch or int(one.after) <= int(one.before):
            yield f"the epoch went from {one.before} to {one.after}, after it had come to {epoch}"
        epoch = int(one.after)
