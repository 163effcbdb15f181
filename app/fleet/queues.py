"""Names of queues and tasks, and the Celery settings that the API (which only sends) and the workers share."""

from __future__ import annotations

import re
from typing import Any

from kombu import Queue

from app.settings import Settings

TASK_PREFIX = "tinker."
SAMPLE_TASK = "tinker.sample"
OPERATION_KINDS = (
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
)


def pool_slug(name: str) -> str:
    """The pool of a base model: its name in lower case, other characters as single dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")[:100] or "model"


def train_queue(pool: str) -> str:
    """Doorbells for runs that no worker holds."""
    return f"train.{pool}"


def sample_queue(pool: str) -> str:
    """Samples for any sampler of the pool."""
    return f"sample.{pool}"


WAKE = "wake."


def wake_queue(worker_id: str) -> str:
    """Doorbells for one worker."""
    return f"{WAKE}{worker_id}"


def doorbells(name: str) -> Queue:
    """A queue whose messages are gone once they are read, which saves two round trips to Redis for each. One that dies
    with its worker is not missed, since the log and the claims say what there is to do.

    It is on the default exchange, so that nothing about it is written down in Redis that would outlive it.
    """
    return Queue(name, no_ack=True)


def operation_task(kind: str) -> str:
    """The doorbell's task name for an operation of this kind."""
    return TASK_PREFIX + kind


def celery_settings(settings: Settings) -> dict[str, Any]:
    """Broker and serialisation: JSON only, short socket time-outs, no result backend (results are in the database)."""
    return {
        "broker_url": settings.redis_url,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "socket_connect_timeout": 1.0,
            "socket_timeout": 5.0,
            "socket_keepalive": True,
            "visibility_timeout": 3600,
        },
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_create_missing_queues": True,
        "task_default_queue": "unrouted",
        "task_default_exchange": "",
        "enable_utc": True,
    }
