"""Checkpoint routes. An id is `<kind>/<name>`, sent as it is; routes with a suffix come before those without."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from pydantic import SecretStr

from app.checkpoints import catalogue, copies
from app.checkpoints.access import reader_of
from app.checkpoints.catalogue import Address
from app.checkpoints.schemas import (
    AskWeightsInfo,
    Checkpoints,
    CheckpointsQuery,
    CopyWeights,
    SetTtl,
    WeightsCopied,
    WeightsInfo,
)
from app.deps import OwnerDep, ServicesDep, in_thread
from app.json_route import StrictJsonRoute

router = APIRouter(prefix="/api/v1", tags=["checkpoints"], route_class=StrictJsonRoute)

ONE = "/training_runs/{training_run_id}/checkpoints/{kind}/{name}"


async def _address(training_run_id: str, kind: str, name: str) -> Address:
    return Address(training_run_id, kind, name)


AddressDep = Annotated[Address, Depends(_address)]


@router.get("/checkpoints")
async def list_checkpoints(
    page: Annotated[CheckpointsQuery, Query()], owner_id: OwnerDep, services: ServicesDep
) -> Checkpoints:
    """Checkpoints of all the caller's runs, newest first."""
    return await in_thread(catalogue.list_of_owner, services.database, owner_id, page)


@router.get("/training_runs/{training_run_id}/checkpoints")
async def list_checkpoints_of_run(training_run_id: str, owner_id: OwnerDep, services: ServicesDep) -> Checkpoints:
    """All checkpoints of a run, newest first."""
    return await in_thread(catalogue.list_of_run, services.database, owner_id, training_run_id)


@router.post(f"{ONE}/publish", status_code=204)
async def publish(address: AddressDep, owner_id: OwnerDep, services: ServicesDep) -> None:
    """Let everybody read a checkpoint; doing it twice is no error."""
    await in_thread(catalogue.publish, services.database, owner_id, address, public=True)


@router.delete(f"{ONE}/publish", status_code=204)
async def unpublish(address: AddressDep, owner_id: OwnerDep, services: ServicesDep) -> None:
    """Make a checkpoint private again; doing it twice is no error."""
    await in_thread(catalogue.publish, services.database, owner_id, address, public=False)


@router.put(f"{ONE}/ttl", status_code=204)
async def set_ttl(address: AddressDep, body: SetTtl, owner_id: OwnerDep, services: ServicesDep) -> None:
    """Set when a checkpoint expires, or that it never does."""
    await in_thread(catalogue.set_ttl, services.database, owner_id, address, body.ttl_seconds)


@router.delete(ONE, status_code=204)
async def delete_checkpoint(address: AddressDep, owner_id: OwnerDep, services: ServicesDep) -> None:
    """Delete a checkpoint; samplers and runs that were made of it go on."""
    await in_thread(catalogue.remove, services.database, owner_id, address)


@router.post("/weights_info")
async def weights_info(body: AskWeightsInfo, owner_id: OwnerDep, services: ServicesDep) -> WeightsInfo:
    """What a checkpoint is of, the caller's or a published one."""
    return await in_thread(catalogue.weights_info, services.database, owner_id, body.tinker_path)


@router.post("/copy_weights")
async def copy_weights(
    body: CopyWeights,
    owner_id: OwnerDep,
    services: ServicesDep,
    x_idempotency_key: Annotated[str | None, Header(max_length=190)] = None,
    x_tinker_weights_access_token: Annotated[SecretStr | None, Header()] = None,
) -> WeightsCopied:
    """Copy a checkpoint, sharing its storage; the answer is the copy's path. One of another account that is not
    published needs a weights access token."""
    reader = await in_thread(reader_of, services.keys, owner_id, x_tinker_weights_access_token)
    path = await in_thread(
        copies.copy_weights,
        services.database,
        owner_id,
        body,
        x_idempotency_key,
        reader,
        quota_bytes=services.settings.tenant_storage_bytes,
    )
    return WeightsCopied(tinker_path=path)
