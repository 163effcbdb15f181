"""A real sampler with a tiny model, in threads of this process; the service's doorbells ring here, not in Celery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis

from app.settings import get_settings
from tests.factories import POOL
from tests.integration.conftest import Api
from tests.integration.held_engine import base_model_only
from tests.unit.workers.train.train_lab import tiny_base
from workers.sample.engines.native import NativeEngine
from workers.sample.recorder import SampleRecorder
from workers.sample.service import SampleService
from workers.sample.usage import SampleUsage


@contextmanager
def quick_sampler(api: Api, *, answers: Callable[[str], bool] = lambda request_id: True) -> Iterator[None]:
    """Answer the samples whose request ids `answers` is true of, from the base model; the others wait."""
    parts: dict[str, Any] = {"usage": SampleUsage(api.database), "recorder": SampleRecorder(api.database)}
    settings = get_settings()
    with redis.Redis.from_url(settings.redis_url) as server:
        engine = NativeEngine(tiny_base(), eos=())
        parts["adapters"] = base_model_only(engine)
        sampler = SampleService(worker_id="quick", pool=POOL, engine=engine, redis=server, settings=settings, **parts)
        sampler.start()

        def ring(*, request_id: str, pool: str, worker_id: str | None = None) -> None:
            if answers(request_id):
                sampler.take([request_id])

        api.client.app.state.services.doorbells.ring_sample = ring  # type: ignore[attr-defined]
        try:
            yield
        finally:
            sampler.stop(10)
