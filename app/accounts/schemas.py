"""Answers of the `auth` routes (WIRE §1.2, §2.6)."""

from __future__ import annotations

from pydantic import BaseModel


class TokenIssued(BaseModel):
    """Answer of `auth/token`."""

    jwt: str


class Organization(BaseModel):
    """The tenant that a key belongs to."""

    name: str


class User(BaseModel):
    """Whoever has the key. Owners have no e-mail address; clients get their name in its place."""

    email: str


class KeyDetails(BaseModel):
    """Whose key it is."""

    org_details: Organization
    user_details: User


class OwnKey(BaseModel):
    """Answer of `GET auth/apikey/me`."""

    key_id: int
    name: str
    note: str
    details: KeyDetails
