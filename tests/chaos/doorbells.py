"""Somebody who takes doorbells out of Redis and loses them, rings them twice, or later and in another order."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from app.db import Database
from app.fleet.models import Worker
from app.fleet.queues import sample_queue, train_queue, wake_queue

_HELD_S = 0.4


@dataclass(slots=True)
class Meddling:
    """`done`: so many doorbells were really lost, repeated or held back."""

    how: str
    done: int = 0


class Meddler:
    """Reads the same lists as the workers, so that it gets some of the messages and they the others."""

    def __init__(self, redis_url: str, database: Database, seed: float) -> None:
        self._database = database
        self._redis: Any = redis.Redis.from_url(redis_url, socket_timeout=2.0, socket_connect_timeout=1.0)
        self._chance = random.Random(seed)
        self._ended = threading.Event()

    def meddle(self, how: str, for_s: float) -> Meddling:
        """`drop`, `repeat` or `shuffle` what comes in the next `for_s`, in a thread; longer, until it has got one."""
        meddling = Meddling(how)
        threading.Thread(target=self._meddle, args=(meddling, for_s), daemon=True).start()
        return meddling

    def end(self) -> None:
        """Leave all that comes from now on."""
        self._ended.set()

    def _meddle(self, meddling: Meddling, for_s: float) -> None:
        end = time.monotonic() + for_s
        while not self._ended.is_set() and (time.monotonic() < end or not meddling.done):
            try:
                meddling.done += self._once(meddling.how)
            except (RedisError, SQLAlchemyError):  # they may be dead as well
                time.sleep(0.1)

    def _once(self, how: str) -> int:
        queues = self._queues()
        if not queues:
            time.sleep(0.1)
            return 0
        held: list[tuple[str, bytes]] = []
        begin = time.monotonic()
        while how == "shuffle" and time.monotonic() < begin + _HELD_S and len(held) < 20:
            if taken := self._redis.brpop(queues, timeout=0.1):
                held.append(taken)
        if how != "shuffle" and (taken := self._redis.brpop(queues, timeout=0.2)):
            held.append(taken)
        rung = {"drop": 0, "repeat": 3, "shuffle": 1}[how] * held
        self._chance.shuffle(rung)
        for queue, message in rung:
            self._redis.lpush(queue, message)
        if rung:
            time.sleep(0.05)  # for the workers to be first
        return len(held)

    def _queues(self) -> list[str]:
        """Queues of doorbells that workers hear."""
        with self._database.read() as session:
            workers = session.execute(select(Worker.id, Worker.pool)).all()
        names = {queue for _, pool in workers for queue in (train_queue(pool), sample_queue(pool))}
        return sorted(names | {wake_queue(worker_id) for worker_id, _ in workers})
