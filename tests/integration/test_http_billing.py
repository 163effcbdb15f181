"""Usage over HTTP, on both databases: by the hour, the caller's own, in a shape that the SDK reads."""

from __future__ import annotations

from datetime import datetime, timedelta

import httpx
import pytest
from tinker.types import BillingUsageResponse, CurrentCheckpointStorageUsageResponse

from app.accounts.service import list_keys
from app.billing import meter
from app.billing.meter import Meter, UsageKind
from app.checkpoints.models import Snapshot
from app.db import utc_now
from app.runs.models import Run
from tests import factories
from tests.integration.conftest import Api

HOUR = timedelta(hours=1)


def owner(who: str = "alice") -> str:
    return list_keys(who)[0][0].owner_id


def used(api: Api, session_id: str, kind: UsageKind, amount: int, *, hour: datetime, who: str = "alice") -> None:
    with api.database.write() as session:
        meter.add(session, {Meter(owner(who), hour, session_id, "tiny", kind): amount})


def ask(api: Api, start: object, end: object, *, who: str = "alice") -> httpx.Response:
    window = {"starting_on": start, "ending_before": end}
    texts = {name: t.isoformat() if isinstance(t, datetime) else str(t) for name, t in window.items()}
    headers = {"x-api-key": api.keys[who]}
    return api.client.get("/api/v1/billing/usage/events", params=texts, headers=headers)


def test_usage_is_told_by_the_hour_largest_first(each_api: Api) -> None:
    api, hour = each_api, meter.this_hour()
    body = {"project_id": "p1", "user_metadata": {"a": "b"}}
    session_id = str(api.ok("create_session", body)["session_id"])
    used(api, session_id, "training", 5, hour=hour)
    used(api, session_id, "prefill", 7, hour=hour)
    used(api, session_id, "prefill_cached", 9, hour=hour)
    used(api, session_id, "sample", 11, hour=hour)
    used(api, session_id, "checkpoint", 1, hour=hour - HOUR)
    used(api, session_id, "training", 99, hour=hour - 2 * HOUR)
    answer = ask(api, hour - HOUR, hour + HOUR)
    usage = BillingUsageResponse.model_validate(answer.json())
    infos = [(event.bucket_start, event.event_info.model_dump()) for event in usage.data]
    assert infos == [
        (hour - HOUR, {"type": "checkpoint", "count": 1}),
        (hour, {"type": "sampling_sample", "token_count": 11}),
        (hour, {"type": "sampling_prefill", "cached": True, "token_count": 9}),
        (hour, {"type": "sampling_prefill", "cached": False, "token_count": 7}),
        (hour, {"type": "training", "token_count": 5}),
    ]
    for event in usage.data:
        assert (event.session_id, event.project_id, event.base_model) == (session_id, "p1", "tiny")
        assert event.bucket_end - event.bucket_start == HOUR
        assert event.user_name == "alice"
        assert event.estimated_cost_usd is None
    assert usage.sessions[session_id].user_metadata == {"a": "b"}
    assert usage.cost_data_through is None


def test_usage_of_others_is_not_told(each_api: Api) -> None:
    hour = meter.this_hour()
    used(each_api, each_api.session("bob"), "training", 5, hour=hour, who="bob")
    assert ask(each_api, hour, hour + HOUR).json() == {"data": [], "sessions": {}, "cost_data_through": None}
    assert len(ask(each_api, hour, hour + HOUR, who="bob").json()["data"]) == 1


def test_usage_of_a_session_that_is_gone_is_still_told(api: Api) -> None:
    hour = meter.this_hour()
    used(api, "gone", "training", 5, hour=hour)
    usage = BillingUsageResponse.model_validate(ask(api, hour, hour + HOUR).json())
    assert [(event.session_id, event.project_id) for event in usage.data] == [("gone", None)]


@pytest.mark.parametrize(
    ("start", "end", "field"),
    [
        ("2026-01-01T00:30:00Z", "2026-01-02T00:00:00Z", "starting_on"),
        ("2026-01-01T00:00:00Z", "2026-01-01T01:00:00.5Z", "ending_before"),
        ("2026-01-01T00:00:00Z", "2026-01-15T01:00:00Z", "ending_before"),
        ("2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z", "ending_before"),
        ("2126-01-01T00:00:00Z", "2126-01-02T00:00:00Z", "starting_on"),
        ("9999-12-31T23:00:00-23:00", "9999-12-31T23:00:00Z", "starting_on"),
        ("0001-01-01T00:00:00+10:00", "0001-01-02T00:00:00Z", "starting_on"),
    ],
)
def test_a_wrong_window_is_refused_by_name(api: Api, start: str, end: str, field: str) -> None:
    answer = ask(api, start, end)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(field)


@pytest.mark.parametrize("text", ["yesterday", ""])
def test_what_is_no_time_is_refused(api: Api, text: str) -> None:
    assert ask(api, text, "2026-01-02T00:00:00Z").status_code == 422


@pytest.mark.parametrize("end", ["2026-01-15T00:00:00Z", "2026-01-15T00:00:00", "2026-01-15T02:00:00+02:00"])
def test_fourteen_days_in_any_zone_are_told(api: Api, end: str) -> None:
    assert ask(api, "2026-01-01T00:00:00Z", end).status_code == 200


# -- stored checkpoints


def test_stored_checkpoints_are_counted_by_project_and_blobs_once(each_api: Api) -> None:
    api = each_api
    with api.database.write() as session:
        for project, names in ((None, ["a"]), ("p1", ["b", "c"])):
            run = factories.add_run(
                session, owner(), session_id=factories.add_session(session, owner(), project_id=project).id
            )
            for name in names:
                row = factories.add_checkpoint(session, run, name)
                session.get_one(Snapshot, row.snapshot_id).size_bytes = 10**9
            again = factories.add_checkpoint(session, run, "again")
            again.snapshot_id = row.snapshot_id
            factories.add_checkpoint(session, run, "expired", expires_at=utc_now() - HOUR)
        factories.add_checkpoint(session, factories.add_run(session, owner("bob")))
    storage = CurrentCheckpointStorageUsageResponse.model_validate(
        api.get("/api/v1/billing/usage/checkpoints/current").json()
    )
    found = {item.project_id: (item.checkpoint_count, item.size_bytes, item.size_gigabytes) for item in storage.data}
    assert found == {None: (2, 10**9, 1.0), "p1": (3, 2 * 10**9, 2.0)}
    assert all(item.estimated_monthly_cost_usd is None and item.user_name == "alice" for item in storage.data)
    one = api.get("/api/v1/billing/usage/checkpoints/current?project_id=p1").json()["data"]
    assert [item["project_id"] for item in one] == ["p1"]


def test_who_has_no_checkpoints_is_told_nothing(each_api: Api) -> None:
    with each_api.database.write() as session:
        run = factories.add_run(session, owner("bob"))
        factories.add_checkpoint(session, session.get_one(Run, run.id))
    assert each_api.get("/api/v1/billing/usage/checkpoints/current").json()["data"] == []
