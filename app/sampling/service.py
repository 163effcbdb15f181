"""Sampling sessions, and samples on their way into Redis and out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from redis.exceptions import RedisError
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app.checkpoints import service as checkpoints
from app.checkpoints.models import Snapshot
from app.db import Database, utc_now
from app.errors import ConflictingReplay, Gone, InvalidRequest, NotFound, Unavailable
from app.fleet.service import ServedModel, find_model
from app.recent import Recent
from app.runs.models import Run
from app.sampling.checks import checked
from app.sampling.keys import SAMPLE_MARK
from app.sampling.models import SamplingSession
from app.sampling.records import sequence_id
from app.sampling.router import SampleRouter
from app.sampling.schemas import CreateSamplingSession, Sample, Sampler
from app.sampling.store import SampleInbox, too_busy
from app.sessions.models import ClientSession
from app.sessions.service import require_live
from app.telemetry.context import note
from app.wire.sampling import StoredSample, decode_stored, encode_stored

_TRUST_S = 2.0
"""How long a process believes that a sampling session's client has not finished since it looked."""
_USED_ENOUGH = timedelta(minutes=10)
"""Weights that were sampled from so lately need not be marked as used."""
_SEEN_ENOUGH = timedelta(seconds=60)
"""A client that was seen so lately need not be marked as seen for the sake of a sample."""


def sampling_session_id(session_id: str, seq_id: int) -> str:
    """Id of a session's n-th sampling session."""
    return f"{session_id}{SAMPLE_MARK}{seq_id}"


@dataclass(frozen=True, slots=True)
class Target:
    """What a sampling session samples from."""

    owner_id: str
    session_id: str
    model: ServedModel
    snapshot_id: str | None
    follows_model_id: str | None


@dataclass(frozen=True, slots=True)
class SubmittedSample:
    """An accepted sample. `worker_id`: the sampler that it goes to; None: any of the pool. `is_new` False: it is known
    already, so nobody needs to be rung."""

    request_id: str
    sequence_ids: list[str]
    pool: str
    worker_id: str | None
    is_new: bool


class SamplingService:
    """Sampling of one API process."""

    def __init__(self, database: Database, inbox: SampleInbox, router: SampleRouter) -> None:
        self._database = database
        self._inbox = inbox
        self._router = router
        self._targets: Recent[str, Target] = Recent(ttl_s=_TRUST_S)

    # -- sampling sessions

    def create_session(self, owner_id: str, request: CreateSamplingSession) -> str:
        """Make a sampling session of a base model or of a checkpoint; a repeated request gives the same one."""
        if (request.base_model is None) == (request.model_path is None):
            raise InvalidRequest("exactly one of base_model and model_path must be given")
        identity = sampling_session_id(request.session_id, request.sampling_session_seq_id)
        try:
            with self._database.write() as session:
                require_live(session, owner_id, request.session_id)
                if (known := session.get(SamplingSession, identity)) is not None:
                    return self._same(known, request)
                session.add(self._make(session, owner_id, request, identity))
        except IntegrityError:
            with self._database.read() as session:
                return self._same(session.get_one(SamplingSession, identity), request)
        return identity

    @staticmethod
    def _same(known: SamplingSession, request: CreateSamplingSession) -> str:
        if known.model_path != request.model_path or (request.base_model or known.base_model) != known.base_model:
            raise ConflictingReplay("sampling_session_seq_id: was already used for another model")
        return known.id

    @staticmethod
    def _make(session: Session, owner_id: str, request: CreateSamplingSession, identity: str) -> SamplingSession:
        snapshot_id, name = None, request.base_model
        if request.model_path is not None:
            found = checkpoints.resolve(session, owner_id, request.model_path, field="model_path")
            snapshot_id, name = found.snapshot.id, found.run.base_model
        assert name is not None
        model = find_model(session, name)
        if model is None:
            raise InvalidRequest(
                f"base_model: no worker serves {name!r}; `get_server_capabilities` lists what is served"
            )
        return SamplingSession(
            id=identity,
            owner_id=owner_id,
            session_id=request.session_id,
            seq_id=request.sampling_session_seq_id,
            base_model=name,
            pool=model.pool,
            model_path=request.model_path,
            snapshot_id=snapshot_id,
        )

    def sampler(self, owner_id: str, identity: str) -> Sampler:
        """`samplers/{id}`. Raises NotFound."""
        with self._database.read() as session:
            row = session.get(SamplingSession, identity)
            if row is None or row.owner_id != owner_id:
                raise NotFound(f"sampler_id: there is no sampling session {identity!r}")
            model = find_model(session, row.base_model)
        name = model.client_name if model else row.base_model
        return Sampler(sampler_id=identity, base_model=name, model_path=row.model_path)

    # -- samples

    async def submit(self, owner_id: str, body: Sample) -> SubmittedSample:
        """Check a sample and store it. Raises InvalidRequest, NotFound, Gone, TooBusy or Unavailable."""
        target = await self._target(owner_id, body.sampling_session_id)
        snapshot_id = target.snapshot_id
        if target.follows_model_id is not None:
            snapshot_id = await run_in_threadpool(self._newest_snapshot, target.follows_model_id)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        note(request_id=request_id)
        request = checked(body, request_id, target.model)
        stored = StoredSample(owner_id, target.session_id, target.model.pool, snapshot_id, request, target.model.name)
        try:
            outcome = await self._inbox.submit(request_id, stored.pool, encode_stored(stored), owner_id=owner_id)
        except (RedisError, OSError) as error:
            raise Unavailable("the broker cannot be reached; try again") from error
        if outcome == "owner full" or outcome == "pool full":
            raise too_busy(outcome, self._inbox.depths, stored.base_model)
        if isinstance(outcome, bytes):
            known = decode_stored(outcome)
            if replace(known.request, prompt=()) != replace(request, prompt=()) or list(known.request.prompt) != list(
                request.prompt
            ):
                raise ConflictingReplay(f"seq_id: {body.seq_id} was already used for another sample")
        worker_id = None
        if outcome == "new":
            worker_id = await self._router.home(stored.pool, snapshot_id, request.prompt, request.num_samples)
        sequence_ids = [sequence_id(request_id, i) for i in range(body.num_samples)]
        return SubmittedSample(request_id, sequence_ids, stored.pool, worker_id, outcome == "new")

    # -- targets

    async def _target(self, owner_id: str, identity: str) -> Target:
        target = self._targets.get(identity)
        if target is None:
            target = await run_in_threadpool(self._load_target, owner_id, identity)
            self._targets.put(identity, target)
        if target.owner_id != owner_id:
            raise NotFound(f"sampling_session_id: there is no sampling session {identity!r}")
        return target

    def _load_target(self, owner_id: str, identity: str) -> Target:
        with self._database.read() as session:
            row = session.get(SamplingSession, identity)
            if row is None or row.owner_id != owner_id:
                raise NotFound(f"sampling_session_id: there is no sampling session {identity!r}")
            client = session.get_one(ClientSession, row.session_id)
            model = find_model(session, row.base_model)
            fixed = row.snapshot_id if row.follows_model_id is None else None
            is_gone = fixed is not None and session.get(Snapshot, fixed) is None
        if client.finished_at is not None:
            raise Gone(f"sampling_session_id: session {row.session_id!r} is finished")
        if is_gone:
            raise Gone(
                f"sampling_session_id: the weights of {identity!r} are gone, since nobody has sampled from them for "
                "long; save weights under a name to keep them"
            )
        if row.last_used_at is None or utc_now() - row.last_used_at > _USED_ENOUGH:
            used = update(SamplingSession).where(SamplingSession.id == row.id).values(last_used_at=utc_now())
            with self._database.write() as session:
                session.execute(used.execution_options(synchronize_session=False))
        if client.silent_since is not None or utc_now() - client.last_seen_at > _SEEN_ENOUGH:
            with self._database.write() as session:  # who samples is not silent, even without heartbeats
                require_live(session, row.owner_id, row.session_id)
        if model is None:
            raise InvalidRequest(f"base_model: no worker serves {row.base_model!r} any more")
        return Target(row.owner_id, row.session_id, model, row.snapshot_id, row.follows_model_id)

    def _newest_snapshot(self, model_id: str) -> str | None:
        with self._database.read() as session:
            return session.scalar(select(Run.sampler_snapshot_id).where(Run.id == model_id))
