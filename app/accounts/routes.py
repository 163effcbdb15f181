"""What a caller may do with its own key: exchange it for a token, look at it, revoke it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header

from app.accounts import service
from app.accounts.key_ring import Caller
from app.accounts.schemas import KeyDetails, Organization, OwnKey, TokenIssued, User
from app.deps import Services, ServicesDep, in_thread
from app.errors import InvalidRequest
from app.json_route import StrictJsonRoute
from app.schemas import Request

router = APIRouter(prefix="/api/v1/auth", tags=["auth"], route_class=StrictJsonRoute)

KeyHeader = Annotated[str | None, Header(alias="x-api-key")]


class ExchangeKey(Request):
    """`auth/token`: nothing but the key, which is in the header."""


@router.post("/token")
async def exchange_key(services: ServicesDep, body: ExchangeKey | None = None, key: KeyHeader = None) -> TokenIssued:
    """A short-lived token, to be sent in the place of the key that this request came with."""
    return TokenIssued(jwt=await in_thread(services.keys.exchange, key))


@router.get("/apikey/me")
async def own_key(services: ServicesDep, key: KeyHeader = None) -> OwnKey:
    """The key that this request came with, by itself or as a token."""
    caller = await in_thread(services.keys.identify, key)
    return await in_thread(_describe, services, caller)


@router.delete("/apikey/me")
async def revoke_own_key(services: ServicesDep, key: KeyHeader = None) -> dict[str, str]:
    """Revoke the key that this request came with, and with it all of its tokens."""
    caller = await in_thread(services.keys.identify, key)
    if caller.key_id is None:
        raise InvalidRequest("X-API-Key: this server takes any key (TINWORKS_AUTH=open), so none can be revoked")
    await in_thread(service.revoke_key, caller.key_id, database=services.database)
    services.keys.forget()
    return {}


def _describe(services: Services, caller: Caller) -> OwnKey:
    if caller.key_id is None:
        number = int(caller.owner_id.removeprefix("open-")[:12], 16)
        return _own_key(number, "open", "this server takes any key", caller.owner_id)
    row, owner = service.describe_key(services.database, caller.key_id)
    return _own_key(row.id, row.name or row.prefix, f"begins with {row.prefix}", owner.name)


def _own_key(key_id: int, name: str, note: str, owner_name: str) -> OwnKey:
    details = KeyDetails(org_details=Organization(name=owner_name), user_details=User(email=owner_name))
    return OwnKey(key_id=key_id, name=name, note=note, details=details)
