"""Scheduled tidying: what silence, time and death leave behind. Each job is safe to run twice, or two at once."""

from __future__ import annotations

import time
from datetime import timedelta

import structlog
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import delete, select, text, update
from sqlalchemy.orm import Session

from app import alive
from app.checkpoints import uploads
from app.checkpoints.models import Checkpoint
from app.custom_losses.service import forget_losses
from app.db import Database, get_database, utc_now
from app.fleet.models import Model
from app.fleet.service import remove_dead_workers
from app.runs import log
from app.runs.results import prune_results
from app.sampling.endings import forget_samples_of_ended_sessions
from app.sampling.records import forget_recorded
from app.sessions import endings
from app.sessions.models import ClientSession
from app.settings import Settings, get_settings
from app.storage.blobs import BlobStore, get_blob_store
from workers import watch
from workers.celery import app
from workers.collector import Collector
from workers.lost_doorbells import forget_lost_doorbells
from workers.snapshot_folders import shared_folders
from workers.uploading import upload_waiting

logger = structlog.get_logger(__name__)

_LOCK_ID = 0x54_49_4A  # "TIJ"
_DEAD_SILENCES = 50
"""A worker that was silent for so many times as long as makes it count as dead is not expected back: ten minutes."""
_collected_up_to: dict[str, str] = {}
_ORPHANED_S = 60.0
_LOST_AFTER = timedelta(days=1)
"""Snapshots that nobody has uploaded by then were in a shared folder that is gone."""
_FORGET_AT_ONCE = 1000
_FORGETTING_S = 10.0
"""Of every 30 s: what comes faster than this is forgotten later."""
_SILENT_FOR_GOOD = timedelta(seconds=30)
"""A client whose session was marked as silent has so long to be heard of; then its samples go. After an outage of ours
all sessions look silent for a moment."""


@app.task(name="tinworks.tidy", ignore_result=True)
def tidy() -> None:
    """Fill sequence gaps, forget old results and records, expire checkpoints, mark silent sessions and end those that
    stay so, close the runs of ended sessions, drop their samples and dead workers' rows, upload what trainers did
    not."""
    settings = get_settings()
    alive.touch(settings)
    database = get_database()
    up_s = _up_for_s(settings)
    with database.write() as session:
        if not database.is_sqlite and not session.scalar(
            text("SELECT pg_try_advisory_xact_lock(:id)"), {"id": _LOCK_ID}
        ):
            return
        gaps = log.fill_gaps(session, older_than=timedelta(seconds=settings.gap_timeout_s))
        forget_losses(session, gone_before=utc_now() - timedelta(seconds=settings.session_retention_s))
        expired = session.execute(delete(Checkpoint).where(Checkpoint.expires_at < utc_now())).rowcount  # type: ignore[attr-defined]
        silent = _mark_silent(session, settings.session_silence_s, up_s=up_s)
        ended = endings.end_silent(session, silent_before=utc_now() - timedelta(seconds=settings.session_retention_s))
        dead = remove_dead_workers(session, silent_for_s=_DEAD_SILENCES * settings.worker_silence_s)
    with database.read() as session:
        forgotten = _forget_samples(session)
    store = get_blob_store()
    _forget_results(database, store, settings)
    closed = _close_runs(database, store, settings)
    counts = {"gaps": len(gaps), "expired": expired, "silent_sessions": silent, "dead_workers": len(dead)}
    counts |= {"forgotten_samples": forgotten, "ended_sessions": ended, "closed_runs": closed}
    if any(counts.values()):
        logger.info("tidied", **counts)
    _upload_orphans(database, store, settings)


def _forget_results(database: Database, store: BlobStore, settings: Settings) -> None:
    """Forget old results and old records, in transactions of their own, until none is left or the time for it is."""
    began, more = time.monotonic(), True
    while more and time.monotonic() - began < _FORGETTING_S:
        now = utc_now()
        with database.write() as session:
            quiet_since = now - timedelta(seconds=settings.result_ttl_s)
            count, blobs = prune_results(session, quiet_since=quiet_since, limit=_FORGET_AT_ONCE)
        with database.write() as session:
            recorded_before = now - timedelta(seconds=settings.sampled_sequence_ttl_s)
            recorded = forget_recorded(session, before=recorded_before, limit=_FORGET_AT_ONCE)
        for key in blobs:
            store.delete(key)
        more = max(count, recorded) == _FORGET_AT_ONCE


@app.task(name="tinworks.collect", ignore_result=True)
def collect() -> None:
    """Delete the doorbells that nobody will hear, and the blobs that nothing refers to."""
    settings, database = get_settings(), get_database()
    try:
        with _redis(settings) as client:
            forget_lost_doorbells(client, database)
    except (RedisError, OSError) as error:
        logger.warning("doorbells_not_forgotten", error=type(error).__name__)
    Collector(database, get_blob_store(), settings, after=_collected_up_to).round()


def _upload_orphans(database: Database, store: BlobStore, settings: Settings) -> None:
    """Upload the snapshots in the shared folder whose trainers did not, and give up those that are in nobody's."""
    if (folders := shared_folders(settings)) is not None:
        upload_waiting(folders, database, store, older_than_s=_ORPHANED_S)
    with database.write() as session:
        if lost := uploads.give_up(session, before=utc_now() - _LOST_AFTER):
            logger.error("snapshots_lost", snapshot_ids=lost)


def _redis(settings: Settings) -> Redis:
    return Redis.from_url(settings.redis_url, socket_connect_timeout=1.0, socket_timeout=5.0)


def _up_for_s(settings: Settings) -> float:
    """How long the service has been seen up; without Redis nobody knows."""
    try:
        with _redis(settings) as client:
            return watch.up_for_s(client)
    except (RedisError, OSError) as error:
        logger.warning("service_not_seen", error=type(error).__name__)
        return 0.0


def _mark_silent(session: Session, silence_s: float, *, up_s: float) -> int:
    """Note which sessions have fallen silent while the service was up; a heartbeat or a request revives them."""
    if up_s < silence_s:
        return 0
    query = (
        select(ClientSession.id)
        .where(ClientSession.finished_at.is_(None), ClientSession.silent_since.is_(None))
        .where(ClientSession.last_seen_at < utc_now() - timedelta(seconds=silence_s))
    )
    silent = list(session.scalars(query))
    if silent:
        session.execute(update(ClientSession).where(ClientSession.id.in_(silent)).values(silent_since=utc_now()))
    return len(silent)


def _close_runs(database: Database, store: BlobStore, settings: Settings) -> int:
    """Leave of the runs of sessions that have ended what is to be kept; returns how many are closed now."""
    how = endings.Closing(
        patience=timedelta(seconds=settings.gap_timeout_s),
        ttl_s=settings.auto_last_ttl_s,
        quota_bytes=settings.tenant_storage_bytes,
    )
    with database.read() as session:
        model_ids = endings.runs_to_close(session)
    closed = 0
    for model_id in model_ids:
        with database.write() as session:
            dead = endings.close_run(session, model_id, how)
        for key in dead or ():
            store.delete(key)
        closed += dead is not None
    return closed


def _forget_samples(session: Session) -> int:
    """Drop the samples of sessions that have ended; returns how many. Without Redis there are none."""
    try:
        with _redis(get_settings()) as client:
            pools = session.scalars(select(Model.pool)).all()
            return forget_samples_of_ended_sessions(client, session, pools, silent_before=utc_now() - _SILENT_FOR_GOOD)
    except (RedisError, OSError) as error:
        logger.warning("samples_not_forgotten", error=type(error).__name__)
        return 0
