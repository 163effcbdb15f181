"""The fleet: `celery -A workers worker -Q train` finds its Celery app here."""

import os

# Read by libgomp when torch loads it: idle OpenMP threads hand their core back after some 20 µs of waiting, not after
# milliseconds, in which the web process or a client on the same machine would have used it.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from workers.celery import app

__all__ = ["app"]
