"""Scheduled tidying: what silence, time and death leave behind. Each job is safe to run twice, or two at once."""

from __future__ import annotations

from collections.abc import Sequence
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
from app.fleet.queues import wake_queue
from app.fleet.service import remove_dead_workers
from app.runs import log
from app.sampling.endings import forget_samples_of_ended_sessions
from app.sampling.records import forget_recorded
from app.sessions.models import ClientSession
from app.settings import Settings, get_settings
from app.storage.blobs import BlobStore, get_blob_store
from workers.celery import app
from workers.collector import Collector
from workers.snapshot_folders import shared_folders
from workers.uploading import upload_waiting

logger = structlog.get_logger(__name__)

_LOCK_ID = 0x54_49_4A  # "TIJ"
_DEAD_WORKER_S = 600.0
_collected_up_to: dict[str, str] = {}
_ORPHANED_S = 60.0
_LOST_AFTER = timedelta(days=1)
"""Snapshots that nobody has uploaded by then were in a shared folder that is gone."""
_SILENT_FOR_GOOD = timedelta(seconds=30)
"""A client whose session was marked as silent has so long to be heard of; then its samples go. After an outage of ours
all sessions look silent for a moment."""


@app.task(name="tinworks.tidy", ignore_result=True)
def tidy() -> None:
    """Fill sequence gaps, forget old results and records, expire checkpoints, mark silent sessions, drop the samples of
    those that have ended and dead workers' rows, upload what trainers did not."""
    settings = get_settings()
    alive.touch(settings)
    database = get_database()
    with database.write() as session:
        if not database.is_sqlite and not session.scalar(
            text("SELECT pg_try_advisory_xact_lock(:id)"), {"id": _LOCK_ID}
        ):
            return
        gaps = log.fill_gaps(session, older_than=timedelta(seconds=settings.gap_timeout_s))
        blobs = log.prune_results(session, finished_before=utc_now() - timedelta(seconds=settings.result_ttl_s))
        forget_recorded(session, before=utc_now() - timedelta(seconds=settings.sampled_sequence_ttl_s))
        forget_losses(session, gone_before=utc_now() - timedelta(seconds=settings.session_retention_s))
        expired = session.execute(delete(Checkpoint).where(Checkpoint.expires_at < utc_now())).rowcount  # type: ignore[attr-defined]
        silent = _mark_silent(session, timedelta(seconds=settings.session_silence_s))
        dead = remove_dead_workers(session, silent_for_s=_DEAD_WORKER_S)
    with database.read() as session:
        forgotten = _tidy_redis(session, dead)
    store = get_blob_store()
    for key in blobs:
        store.delete(key)
    counts = {"gaps": len(gaps), "expired": expired, "silent_sessions": silent, "dead_workers": len(dead)}
    counts["forgotten_samples"] = forgotten
    if any(counts.values()):
        logger.info("tidied", **counts)
    _upload_orphans(database, store, settings)


@app.task(name="tinworks.collect", ignore_result=True)
def collect() -> None:
    """Delete the blobs that nothing refers to."""
    Collector(get_database(), get_blob_store(), get_settings(), after=_collected_up_to).round()


def _upload_orphans(database: Database, store: BlobStore, settings: Settings) -> None:
    """Upload the snapshots in the shared folder whose trainers did not, and give up those that are in nobody's."""
    if (folders := shared_folders(settings)) is not None:
        upload_waiting(folders, database, store, older_than_s=_ORPHANED_S)
    with database.write() as session:
        if lost := uploads.give_up(session, before=utc_now() - _LOST_AFTER):
            logger.error("snapshots_lost", snapshot_ids=lost)


def _mark_silent(session: Session, silence: timedelta) -> int:
    """Note which sessions have fallen silent; a heartbeat or a request revives them."""
    query = (
        select(ClientSession.id)
        .where(ClientSession.finished_at.is_(None), ClientSession.silent_since.is_(None))
        .where(ClientSession.last_seen_at < utc_now() - silence)
    )
    silent = list(session.scalars(query))
    if silent:
        session.execute(update(ClientSession).where(ClientSession.id.in_(silent)).values(silent_since=utc_now()))
    return len(silent)


def _tidy_redis(session: Session, dead_workers: Sequence[str]) -> int:
    """Drop the samples of sessions that have ended, and the doorbells that dead workers never heard; returns how many
    samples. Without Redis there are neither."""
    try:
        with Redis.from_url(get_settings().redis_url, socket_connect_timeout=1.0, socket_timeout=5.0) as client:
            if dead_workers:
                client.delete(*map(wake_queue, dead_workers))
            pools = session.scalars(select(Model.pool)).all()
            return forget_samples_of_ended_sessions(client, session, pools, silent_before=utc_now() - _SILENT_FOR_GOOD)
    except (RedisError, OSError) as error:
        logger.warning("redis_not_tidied", error=type(error).__name__)
        return 0
