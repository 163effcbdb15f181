"""The fleet: `celery -A workers worker -Q train` finds its Celery app here."""

from workers.celery import app

__all__ = ["app"]
