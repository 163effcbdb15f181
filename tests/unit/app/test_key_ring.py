"""Keys: what is stored of one, whom it belongs to, and when it stops working."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from app.accounts.key_ring import KeyRing
from app.accounts.models import ApiKey, Owner
from app.accounts.service import create_key, hash_key, list_keys, revoke_key
from app.db import Database, get_database
from app.errors import Unauthorized
from app.settings import Settings


@pytest.fixture
def keys(configure: Callable[..., None], sqlite_url: str, tmp_path: Path) -> Database:
    configure(DATABASE_URL=sqlite_url, TINWORKS_DATA_DIR=tmp_path)
    return get_database()


def ring(database: Database, **settings: object) -> KeyRing:
    return KeyRing(database, Settings(**({"key_cache_s": 0} | settings)))


def test_a_key_is_stored_as_its_hash_only(keys: Database) -> None:
    row, secret = create_key("alice", "laptop")
    with keys.read() as session:
        stored = session.get_one(ApiKey, row.id)
        columns = [str(getattr(stored, column.key)) for column in ApiKey.__table__.columns]
    assert hash_key(secret) in columns
    assert all(secret not in column for column in columns)
    assert len(secret) - len(stored.prefix) > 32


def test_every_key_of_an_owner_finds_that_owner(keys: Database) -> None:
    (first, one), (second, two) = create_key("alice"), create_key("alice")
    assert first.owner_id == second.owner_id
    assert ring(keys).look_up(one) == ring(keys).look_up(two) == first.owner_id
    assert len(list_keys("alice")) == 2


def test_keys_of_two_owners_find_two_owners(keys: Database) -> None:
    assert ring(keys).look_up(create_key("alice")[1]) != ring(keys).look_up(create_key("bob")[1])


@pytest.mark.parametrize("secret", [None, "", "sk-not-ours", "tml-" + "x" * 600, "tml-unknown"])
def test_what_is_no_key_is_refused(keys: Database, secret: str | None) -> None:
    with pytest.raises(Unauthorized, match="X-API-Key"):
        ring(keys).look_up(secret)


def test_a_revoked_key_is_refused_and_the_owners_other_key_is_not(keys: Database) -> None:
    (row, secret), (_, other) = create_key("alice"), create_key("alice")
    assert revoke_key(row.id)
    with pytest.raises(Unauthorized, match="revoked"):
        ring(keys).look_up(secret)
    assert ring(keys).look_up(other) == row.owner_id


def test_a_key_is_remembered_for_as_long_as_the_settings_say(keys: Database) -> None:
    _, secret = create_key("alice")
    forgetful, patient = ring(keys), ring(keys, key_cache_s=60)
    assert patient.remembered(secret) is None
    owner_id = patient.look_up(secret)
    forgetful.look_up(secret)
    assert patient.remembered(secret) == owner_id
    assert forgetful.remembered(secret) is None


def test_an_open_server_takes_any_key_and_each_is_an_owner_of_its_own(keys: Database) -> None:
    open_ring = ring(keys, auth="open")
    first = open_ring.look_up("tml-anything")
    assert open_ring.look_up("tml-anything") == first
    assert open_ring.look_up("tml-other") != first
    assert "anything" not in first
    with pytest.raises(Unauthorized):
        open_ring.look_up("anything")


def test_the_first_requests_of_an_open_key_may_come_at_once(database: Database) -> None:
    barrier = threading.Barrier(8)

    def look_up(secret: str) -> str:
        own = ring(database, auth="open")
        with database.read() as session:
            session.execute(text("SELECT 1"))  # every thread has its connection when the race begins
            barrier.wait()
        return own.look_up(secret)

    with ThreadPoolExecutor(8) as pool:
        for turn in range(5):
            owners = set(pool.map(look_up, [f"tml-{turn}"] * 8))
            assert len(owners) == 1
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(Owner)) == 5
