"""Samples on record: there before their client sees them, equal to what it sees, found by owner and session only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import redis
from sqlalchemy import update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from tinker.proto.response_conv import deserialize_sample_response

from app.db import Database, utc_now
from app.runs.models import Run
from app.sampling.models import RecordedSample
from app.sampling.records import NewRecord, RecordedSequence, find_recorded, record
from app.sampling.store import SampleAnswer
from app.sessions.models import ClientSession
from app.settings import Settings
from app.wire.sampling import encode_result
from app.wire.types import SampledSequence, SampleResult
from tests.factories import POOL, add_recorded_sample, new_run
from tests.integration.conftest import Api
from tests.integration.held_engine import HeldEngine, base_model_only
from tests.services import wait_for
from workers.janitor import tidy
from workers.sample.recorder import SampleRecorder
from workers.sample.service import SampleService


def result(*tokens: int) -> SampleResult:
    """Two sequences."""
    sequences = [
        SampledSequence("length", np.array(drawn, np.int32), np.linspace(-0.1, -3, len(drawn), dtype=np.float32))
        for drawn in (tokens, tokens[::-1][:-1])
    ]
    return SampleResult(sequences)


def found(database: Database, run: Run, *ids: str, owner_id: str = "", session_id: str = "") -> dict[str, Any]:
    with database.read() as session:
        return find_recorded(
            session, owner_id=owner_id or run.owner_id, session_id=session_id or run.session_id, sequence_ids=ids
        )


@pytest.fixture
def run(database: Database) -> Run:
    return new_run(database)


def add(database: Database, run: Run, tokens: tuple[int, ...] = (4, 5, 6)) -> list[str]:
    sequences = [(tokens, [-0.5] * len(tokens)), ([9], [-1.25])]
    with database.write() as session:
        return add_recorded_sample(
            session, owner_id=run.owner_id, session_id=run.session_id, prompt=[1, 2], sequences=sequences
        )


# -- records


def test_a_sequence_is_found_by_its_id(database: Database, run: Run) -> None:
    first, second = add(database, run)
    both = found(database, run, first, second, second)
    assert set(both) == {first, second}
    sequence = both[second]
    assert isinstance(sequence, RecordedSequence)
    assert (sequence.sequence_id, sequence.tokens.tolist(), sequence.logprobs.tolist()) == (second, [9], [-1.25])
    assert sequence.prompt.tolist() == [1, 2]
    assert [str(array.dtype) for array in (sequence.tokens, sequence.logprobs, sequence.prompt)] == [
        "int32",
        "float32",
        "int32",
    ]


def test_what_is_not_there_is_not_found(database: Database, run: Run) -> None:
    first, _ = add(database, run)
    request_id = first.rpartition(":")[0]
    odd = ("", "x", request_id, f"{request_id}:", f"{request_id}:2", f"{request_id}:00", f"{request_id}:-1", "y:0")
    odd += ("y:" + "9" * 5000, "y\0:0", f"{request_id}:\u0661")
    assert found(database, run, *odd) == {}


def test_only_their_owner_finds_them_and_in_their_session(database: Database, run: Run) -> None:
    first, _ = add(database, run)
    other = new_run(database)
    assert found(database, run, first, owner_id=other.owner_id) == {}
    assert found(database, run, first, session_id=other.session_id) == {}
    assert set(found(database, run, first)) == {first}


def test_more_samples_than_one_query_can_name(database: Database, run: Run) -> None:
    requests = [f"{run.session_id}:sample:0:{number}" for number in range(1101)]
    samples = [
        NewRecord(name, run.owner_id, run.session_id, [1], encode_result(result(number, 0)))
        for number, name in enumerate(requests)
    ]
    with database.write() as session:
        record(session, samples)
    ids = [f"{request_id}:0" for request_id in requests]
    sequences = found(database, run, *ids)
    assert [sequences[name].tokens.tolist() for name in ids] == [[number, 0] for number in range(1101)]


def test_the_first_record_of_a_sample_stays(database: Database, run: Run) -> None:
    def put(tokens: list[int], response: SampleResult) -> bytes | None:
        new = NewRecord("s:sample:0:1", run.owner_id, run.session_id, tokens, encode_result(response))
        beside = NewRecord(f"s:sample:0:{len(seen) + 10}", run.owner_id, run.session_id, [3], b"")
        seen.append(tokens)
        with database.write() as session:
            answers = record(session, [beside, new])
        assert answers[beside.request_id] == b""
        return answers[new.request_id]

    seen: list[list[int]] = []
    first = put([1, 2], result(7, 8))
    assert first == encode_result(result(7, 8))
    assert put([1, 2], result(4, 3)) == first
    assert put([1, 3], result(4, 3)) is None
    assert found(database, run, "s:sample:0:1:0")["s:sample:0:1:0"].tokens.tolist() == [7, 8]


def test_records_go_after_a_day(configure: Callable[..., None], database: Database, redis_url: str, run: Run) -> None:
    configure(DATABASE_URL=database.url, REDIS_URL=redis_url)
    old, young = add(database, run)[0], add(database, run)[0]
    with database.write() as session:
        aged = update(RecordedSample).where(RecordedSample.request_id == old.rpartition(":")[0])
        session.execute(aged.values(created_at=utc_now() - timedelta(hours=24, seconds=1)))
    tidy()
    assert set(found(database, run, old, young)) == {young}


# -- what a sampler does


class Outage:
    """A database that is away when the test says so."""

    def __init__(self, database: Database) -> None:
        self.away = False
        self.tries = 0
        self._database = database

    @contextmanager
    def write(self) -> Iterator[Session]:
        self.tries += 1
        if self.away:
            raise OperationalError("INSERT", {}, Exception("connection refused"))
        with self._database.write() as session:
            yield session


class Sampling:
    """A sampler whose engine is held, and a client with a session to sample in."""

    def __init__(self, api: Api, server: redis.Redis) -> None:
        self.api = api
        self.engine = HeldEngine()
        self.outage = Outage(api.database)
        self._session_id = api.session()
        body = {"session_id": self._session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self._sampler = api.ok("create_sampling_session", body)["sampling_session_id"]
        stubs: dict[str, Any] = {
            "usage": SimpleNamespace(
                start=lambda: None, stop=lambda timeout_s: None, counted=lambda stored, deliver: deliver
            ),
            "adapters": base_model_only(self.engine),
        }
        self.service = SampleService(
            worker_id="w1",
            pool=POOL,
            engine=self.engine,
            recorder=SampleRecorder(cast(Database, self.outage)),
            redis=server,
            settings=Settings(sample_claim_s=0.3),
            **stubs,
        )

    def ask(self, number: int, *, recorded: bool = True) -> str:
        """A sample that the engine works on."""
        body = {
            "sampling_session_id": self._sampler,
            "seq_id": number,
            "num_samples": 2,
            "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "record_stability_info": recorded,
        }
        request_id = str(self.api.ok("asample", body)["request_id"])
        self.service.take([request_id])
        wait_for(lambda: request_id in self.engine.jobs)
        return request_id

    def owner(self) -> tuple[str, str]:
        with self.api.database.read() as session:
            return session.get_one(ClientSession, self._session_id).owner_id, self._session_id

    def recorded(self, request_id: str) -> list[list[int]]:
        """The tokens on record."""
        owner_id, session_id = self.owner()
        ids = [f"{request_id}:{i}" for i in range(2)]
        with self.api.database.read() as session:
            sequences = find_recorded(session, owner_id=owner_id, session_id=session_id, sequence_ids=ids)
        return [sequences[name].tokens.tolist() for name in ids if name in sequences]

    def delivered(self, request_id: str) -> list[list[int]]:
        """The tokens that the client gets."""
        wait_for(lambda: self.api.poll(request_id).status_code != 408)
        answer = self.api.poll(request_id)
        assert answer.status_code == 200
        return [sequence.tokens for sequence in deserialize_sample_response(answer.content).sequences]

    def is_pending(self, request_id: str) -> bool:
        return self.api.poll(request_id).status_code == 408


@pytest.fixture
def sampling(each_api: Api, redis_url: str) -> Iterator[Sampling]:
    with redis.Redis.from_url(redis_url) as server:
        made = Sampling(each_api, server)
        made.service.start()
        yield made
        made.service.stop(5)


def test_a_recorded_sample_is_on_record_as_its_client_gets_it(sampling: Sampling) -> None:
    request_id = sampling.ask(0)
    sampling.engine.end(request_id, result(7, 8, 9))
    assert sampling.delivered(request_id) == [[7, 8, 9], [9, 8]]
    assert sampling.recorded(request_id) == [[7, 8, 9], [9, 8]]


def test_others_leave_no_record(sampling: Sampling) -> None:
    request_id = sampling.ask(0, recorded=False)
    sampling.engine.end(request_id, result(7, 8, 9))
    assert sampling.delivered(request_id)
    assert sampling.recorded(request_id) == []


def test_without_its_record_a_sample_waits_and_holds_nobody_up(sampling: Sampling) -> None:
    sampling.outage.away = True
    held, other = sampling.ask(0), sampling.ask(1, recorded=False)
    sampling.engine.end(held, result(7, 8, 9))
    wait_for(lambda: sampling.outage.tries >= 1)
    sampling.engine.end(other, result(5, 6))
    assert sampling.delivered(other) == [[5, 6], [6]]
    assert sampling.is_pending(held)
    sampling.outage.away = False
    assert sampling.delivered(held) == [[7, 8, 9], [9, 8]]
    assert sampling.recorded(held) == [[7, 8, 9], [9, 8]]


def test_a_sample_drawn_again_after_a_death_is_what_the_dead_sampler_recorded(sampling: Sampling) -> None:
    """It died between record and delivery; the one that takes over draws other tokens, and delivers the first ones."""
    request_id = sampling.ask(0)
    with sampling.api.database.write() as session:
        record(session, [NewRecord(request_id, *sampling.owner(), [1, 2], encode_result(result(7, 8, 9)))])
    sampling.engine.end(request_id, result(3, 4))
    assert sampling.delivered(request_id) == [[7, 8, 9], [9, 8]]
    assert sampling.recorded(request_id) == [[7, 8, 9], [9, 8]]


def test_a_failed_sample_leaves_no_record(sampling: Sampling) -> None:
    request_id = sampling.ask(0)
    sampling.engine.end(request_id, RuntimeError("no"))
    wait_for(lambda: not sampling.is_pending(request_id))
    assert sampling.api.poll(request_id).json()["category"] == "server"
    assert sampling.recorded(request_id) == []


def test_a_number_that_is_on_record_for_another_prompt_fails(sampling: Sampling) -> None:
    sampling.outage.away = True
    bad, good = sampling.ask(0), sampling.ask(1)
    sampling.engine.end(bad, result(7, 8))
    wait_for(lambda: sampling.outage.tries >= 1)
    sampling.engine.end(good, result(5, 6))
    with sampling.api.database.write() as session:
        record(session, [NewRecord(bad, *sampling.owner(), [3], b"")])
    sampling.outage.away = False
    assert sampling.delivered(good) == [[5, 6], [6]]
    wait_for(lambda: not sampling.is_pending(bad))
    assert "seq_id" in sampling.api.poll(bad).json()["error"]


def test_a_record_that_vanishes_at_once_fails_its_sample_and_no_later_one(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there, so nothing was added, and then the janitor took it."""

    def vanishing(session: Session, samples: list[NewRecord]) -> dict[str, bytes | None]:
        return {name: answer for name, answer in record(session, samples).items() if name != "gone"}

    monkeypatch.setattr("workers.sample.recorder.record", vanishing)
    recorder = SampleRecorder(database)
    answers: dict[str, SampleAnswer] = {}
    recorder.start()
    try:
        for name in ("gone", "kept"):
            new = NewRecord(name, run.owner_id, run.session_id, [1], encode_result(result(1, 2)))
            recorder.put(new, answers.__setitem__)
            wait_for(lambda name=name: name in answers)
    finally:
        recorder.stop(5)
    assert [answers[name].kind for name in ("gone", "kept")] == ["error", "proto"]


def test_a_sample_that_cannot_be_recorded_keeps_no_other_from_its_record(database: Database, run: Run) -> None:
    outage = Outage(database)
    outage.away = True
    recorder = SampleRecorder(cast(Database, outage))
    answers: dict[str, SampleAnswer] = {}
    for name, owner_id in (("a", run.owner_id), ("b", "nobody"), ("c", run.owner_id)):
        recorder.put(NewRecord(name, owner_id, run.session_id, [1], encode_result(result(1, 2))), answers.__setitem__)
    recorder.start()
    try:
        wait_for(lambda: outage.tries >= 1)
        assert answers == {}
        outage.away = False
        wait_for(lambda: len(answers) == 3)
    finally:
        recorder.stop(5)
    assert [answers[name].kind for name in "abc"] == ["proto", "error", "proto"]
    assert set(found(database, run, "a:0", "b:0", "c:0")) == {"a:0", "c:0"}
