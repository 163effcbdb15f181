"""The installation's secret, and the keys derived from it: one for each purpose, none of use for another."""

from __future__ import annotations

import hashlib
import hmac

from app.accounts.models import Secret
from app.db import Database
from app.settings import Settings

SECRET_NAME = "installation"


def derived_key(database: Database, settings: Settings, purpose: str) -> bytes:
    """32 bytes for one purpose, the same in every process: from `TINWORKS_SECRET_KEY`, else from the database's row."""
    secret = settings.secret_key
    if not secret:
        with database.read() as session:
            secret = session.get_one(Secret, SECRET_NAME).value
    return hmac.new(secret.encode(), f"tinworks {purpose}".encode(), hashlib.sha256).digest()
