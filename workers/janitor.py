"""Scheduled tidying: what silence, time and death leave behind. Each job is safe to run twice, or two at once."""

from __future__ import annotations

from datetime import timedelta

import structlog
from sqlalchemy import delete, select, text, update
from sqlalchemy.orm import Session

from app.checkpoints.models import Checkpoint
from app.custom_losses.service import forget_losses
from app.db import get_database, utc_now
from app.fleet.service import remove_dead_workers
from app.runs import log
from app.sampling.records import forget_recorded
from app.sessions.models import ClientSession
from app.settings import get_settings
from app.storage.blobs import get_blob_store
from workers.celery import app

logger = structlog.get_logger(__name__)

_LOCK_ID = 0x54_49_4A  # "TIJ"
_DEAD_WORKER_S = 600.0


@app.task(name="tinworks.tidy", ignore_result=True)
def tidy() -> None:
    """Fill sequence gaps, forget old results and records, expire checkpoints, mark silent sessions, drop dead workers'
    rows."""
    settings = get_settings()
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
    store = get_blob_store()
    for key in blobs:
        store.delete(key)
    if gaps or expired or silent or dead:
        logger.info("tidied", gaps=len(gaps), expired=expired, silent_sessions=silent, dead_workers=dead)


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
