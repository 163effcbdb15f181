"""What happens to leases, in one place for the log and the metrics."""

from __future__ import annotations

from typing import Literal

import structlog

from workers.metrics import LEASES

logger = structlog.get_logger(__name__)

Change = Literal["taken", "released", "lost", "crashed"]
"""`crashed`: given back because the run's operations, or its restore, brought the cycle down."""
_EVENTS = {"taken": "lease_taken", "released": "lease_released", "lost": "lease_lost", "crashed": "lease_crashed"}


def note(change: Change, *, model_id: str, epoch: int, worker_id: str, crashes: int = 0) -> None:
    """Log and count a change. `crashes`: workers that died at the operation that comes next."""
    LEASES.labels(change).inc()
    facts = {"model_id": model_id, "epoch": epoch, "worker_id": worker_id} | ({"crashes": crashes} if crashes else {})
    level = logger.info if change in ("taken", "released") else logger.warning
    level(_EVENTS[change], **facts)
