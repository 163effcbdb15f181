"""All Celery policy of the workers: the app, its queues, and what happens when a worker starts and stops.

People type `-Q train`, `-Q sample`, `-Q train,sample` or `-Q janitor`; at start these roles become the queues of this
worker's pool and, for its own doorbells, `wake.<worker_id>`. Tasks only hand work over and return, so four threads and
early acknowledgement are enough for any load.
"""

from __future__ import annotations

import atexit
import signal
import sys
import time
from functools import partial
from types import FrameType
from typing import Any

from celery import Celery, signals
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.platforms import EX_FAILURE, EX_OK
from celery.worker import state

from app.fleet.queues import celery_settings, doorbells, sample_queue, train_queue, wake_queue
from app.settings import get_settings
from app.telemetry.logs import configure_logs
from app.up.signals import SAME_REQUEST_S

ROLES = ("train", "sample", "janitor")
_first_asked = 0.0

app = Celery("tinworks", include=["workers.tasks", "workers.janitor"])
app.conf.update(
    celery_settings(get_settings()),
    worker_pool="threads",
    worker_concurrency=4,
    worker_prefetch_multiplier=16,
    task_acks_late=False,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    worker_send_task_events=False,
    worker_enable_remote_control=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    beat_scheduler="celery.beat:Scheduler",
    beat_schedule={
        "tidy": {"task": "tinworks.tidy", "schedule": 30.0, "options": {"queue": "janitor", "expires": 60}},
        "collect": {"task": "tinworks.collect", "schedule": 300.0, "options": {"queue": "janitor", "expires": 300}},
    },
)


class WrongStart(SystemExit):
    """The worker was started in a way that cannot work; the text says how to start it."""


@signals.setup_logging.connect
def _logging(**kwargs: Any) -> None:
    configure_logs(get_settings())


@signals.celeryd_init.connect
def _check_pool(options: dict[str, Any] | None = None, **kwargs: Any) -> None:
    """Refuse pools that fork: a child would lack the model's threads, and CUDA does not survive a fork."""
    pool = (options or {}).get("pool_cls") or app.conf.worker_pool
    named = _pool_on_command_line(sys.argv)
    if named not in (None, "threads", "solo") or not _is_usable(pool):
        raise WrongStart(
            f"tinworks workers run in the threads pool, not in {named or pool}: a forked child has neither the model's "
            "threads nor a usable CUDA context. Leave --pool away."
        )


def _is_usable(pool: Any) -> bool:
    if isinstance(pool, str):
        return pool in ("threads", "solo")
    return isinstance(pool, type) and issubclass(pool, ThreadPool | SoloPool)


def _pool_on_command_line(argv: list[str]) -> str | None:
    """Celery takes `--pool prefork` for "not given" where a pool is configured, so we look at what was typed."""
    for i, word in enumerate(argv):
        for flag in ("--pool", "-P"):
            if word == flag and i + 1 < len(argv):
                return argv[i + 1]
            if word.startswith(flag) and len(word) > len(flag) and not word.startswith("--po" + "ol-"):
                return word.removeprefix(flag).lstrip("=")
    return None


@signals.celeryd_after_setup.connect
def _start(instance: Any, **kwargs: Any) -> None:
    """Translate the roles into queues, and load what they need before the first message is taken."""
    queues = instance.app.amqp.queues
    asked = set(queues.consume_from)
    roles = tuple(role for role in ROLES if role in asked)
    if not roles or asked - set(ROLES):
        raise WrongStart("say what this worker is for: -Q train, -Q sample, -Q train,sample or -Q janitor")
    serving = tuple(role for role in roles if role != "janitor")
    if not serving:
        return
    try:
        from workers.process import start  # torch is imported only where it is needed
    except ImportError as error:
        raise WrongStart(f"this worker cannot start: {error}") from error

    worker = start(serving)
    for role in serving:
        queues.deselect(role)
    queues.select_add(doorbells(wake_queue(worker.worker_id)))
    if "train" in serving:
        queues.select_add(doorbells(train_queue(worker.pool)))
    if "sample" in serving:
        queues.select_add(doorbells(sample_queue(worker.pool)))


@signals.worker_ready.connect
def _ready(sender: Any = None, **kwargs: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, _asked_to_end)
    if "workers.process" in sys.modules:
        process = sys.modules["workers.process"]
        process.current().on_drain = partial(_leave_pool, sender, process.current())
        process.announce(unless=lambda: state.should_stop is not None or state.should_terminate is not None)


def _leave_pool(consumer: Any, worker: Any, leave: bool) -> None:
    """Let others hear the pool's doorbells, or listen to them again: one that is being emptied would waste them."""
    names = {"train": train_queue, "sample": sample_queue}
    for role in worker.roles:
        act = consumer.cancel_task_queue if leave else consumer.add_task_queue
        consumer.call_soon(act, names[role](worker.pool))


def _asked_to_end(number: int, frame: FrameType | None) -> None:
    """A signal asks this process to end; SIGQUIT, and any second one, ask it to do so at once.

    Celery's own handler of SIGQUIT stops the thread pool from inside the handler. Where the signal finds the main
    thread handing a task to that pool it waits forever for the lock it holds itself; so ours only says what to do.
    """
    global _first_asked
    _first_asked = _first_asked or time.monotonic()
    if number == signal.SIGQUIT:
        state.should_terminate = EX_FAILURE
    else:
        state.should_stop = EX_OK
    at_once = number == signal.SIGQUIT or time.monotonic() - _first_asked > SAME_REQUEST_S
    if at_once and "workers.process" in sys.modules:
        sys.modules["workers.process"].hurry()


@signals.worker_shutdown.connect
def _stop(**kwargs: Any) -> None:
    if "workers.process" in sys.modules:
        sys.modules["workers.process"].stop()


atexit.register(_stop)  # Celery says nothing of a shutdown that began with SIGQUIT
