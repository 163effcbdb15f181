"""Requests about sessions, checkpoints and lists with some fields changed, and what can be seen afterwards."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.e2e.field_checks import Probe
from tests.e2e.field_world import Changes, Refusal, World
from tests.e2e.wire_client import WireClient


def create_session(world: World, changes: Changes) -> Any:
    """`create_session`: what is shown of the session."""
    base: dict[str, Any] = {
        "tags": [],
        "user_metadata": None,
        "sdk_version": "0.38.0",
        "project_id": None,
        "display_name": None,
        "type": "create_session",
    }
    made = world.json(world.wire.post("create_session", world.body(base, changes)))
    if isinstance(made, Refusal):
        return made
    found = world.json(world.wire.post("sessions/search", {"session_id": made["session_id"]}))
    listed = {key: value for key, value in found["sessions"][0].items() if key not in ("session_id", "created_at")}
    return listed | world.get(f"sessions/{made['session_id']}")


def posted(path: str, **base: Any) -> Probe:
    """A POST of a body; `$name` in it is that of the world."""

    def probe(world: World, changes: Changes) -> Any:
        body = world.body(base, changes)
        return world.json(world.wire.post(path, {key: world.resolved(value) for key, value in body.items()}))

    return probe


def queried(path: str) -> Probe:
    """A GET with a query, by the tenant whose things do not change."""

    def probe(world: World, changes: Changes) -> Any:
        known = shelf(world)
        place = path.format(run=known.runs[0], session=known.sessions[0], published=known.published)
        return world.json(known.wire.http.get(place, params=dict(changes)))

    return probe


def finish(world: World, changes: Changes) -> Any:
    """`finish` of a new session: what the search says of it."""
    session_id = WireClient(world.base_url, world.key).session_id
    body = world.body({"reason": {"type": "success"}, "detail": None}, changes)
    ended = world.json(world.wire.post(f"sessions/{session_id}/finish", body))
    if isinstance(ended, Refusal):
        return ended
    found = world.json(world.wire.post("sessions/search", {"session_id": session_id}))
    return found["sessions"][0]["status"]


def assign_project(world: World, changes: Changes) -> Any:
    """`project` of a new session: what the search says of it."""
    session_id = WireClient(world.base_url, world.key).session_id
    body = world.body({"project_id": "alpha"}, changes)
    moved = world.json(world.wire.http.put(f"sessions/{session_id}/project", json=body))
    if isinstance(moved, Refusal):
        return moved
    found = world.json(world.wire.post("sessions/search", {"session_id": session_id}))
    return found["sessions"][0]["project_id"]


def set_ttl(world: World, changes: Changes) -> Any:
    """`ttl` of a checkpoint: when it expires."""
    run, kind, name = world.weights.removeprefix("tinker://").split("/")
    body = world.body({"ttl_seconds": 7200}, changes)
    done = world.json(world.wire.http.put(f"training_runs/{run}/checkpoints/{kind}/{name}/ttl", json=body))
    if isinstance(done, Refusal):
        return done
    listed = world.get(f"training_runs/{run}/checkpoints")["checkpoints"]
    return next(each["expires_at"] for each in listed if each["tinker_path"] == world.weights) is None


def copy_weights(world: World, changes: Changes) -> Any:
    """`copy_weights`: where the copy is, and what is shown of it. `header` names the source's owner's key."""
    base: dict[str, Any] = {"source_path": world.weights, "destination_project_id": f"p{world.serial()}"}
    headers = {}
    if "header" in changes:
        headers["X-Tinker-Weights-Access-Token"] = world.resolved(changes["header"])
    if "destination_project_id" not in changes and "session_id" in changes:
        base.pop("destination_project_id")
    body = world.body(base, {key: value for key, value in changes.items() if key != "header"})
    made = world.json(world.wire.http.post("copy_weights", json=body, headers=headers))
    if isinstance(made, Refusal):
        return made
    run = made["tinker_path"].split("/")[2]
    listed = world.get(f"training_runs/{run}/checkpoints")["checkpoints"][0]
    session = world.json(world.wire.post("sessions/search", {"session_id": run.split(":")[0]}))["sessions"][0]
    project = session["project_id"] if "destination_project_id" in changes or "session_id" in changes else ""
    return {
        "name": listed["checkpoint_id"],
        "slot": run.rpartition(":")[2],
        "expires": listed["expires_at"] is None,
        "project": project,
    }


def repeated(path: str, **base: Any) -> Probe:
    """A request sent twice with idempotency keys: whether the answers are the same."""

    def probe(world: World, changes: Changes) -> Any:
        body = {key: world.resolved(value) for key, value in base.items()}
        mark = uuid.uuid4().hex
        keys = [mark, mark if changes["same"] else f"{mark}-2"]
        answers = [world.wire.http.post(path, json=body, headers={"X-Idempotency-Key": key}) for key in keys]
        first, second = (world.json(answer) for answer in answers)
        assert not isinstance(first, Refusal), first
        return first == second

    return probe


def keyed(method: str, path: str) -> Probe:
    """A request with a key."""

    def probe(world: World, changes: Changes) -> Any:
        headers = {"X-API-Key": world.resolved(changes["key"])}
        return world.json(world.wire.http.request(method, path, headers=headers))

    return probe


class Shelf:
    """A tenant whose sessions, runs and checkpoints stay as they are, so that lists can be compared."""

    def __init__(self, world: World) -> None:
        self.wire = WireClient(world.base_url)
        bodies: list[dict[str, Any]] = [
            {"display_name": "red fox", "project_id": "alpha", "user_metadata": {"a": "1"}},
            {"display_name": "red hen", "user_metadata": {"a": "2"}},
        ]
        self.sessions = [self.wire.session_id]
        self.sessions += [self.wire.post("create_session", body).json()["session_id"] for body in bodies]
        for session_id, reason in zip(self.sessions[1:], ("success", "errored"), strict=True):
            if reason == "errored":
                self.wire.post(f"sessions/{session_id}/finish", {"reason": {"type": reason}})
        self.runs = [self.wire.create_run(rank=2) for _ in range(2)]
        for run in self.runs:
            world.settle(self.wire.post("save_weights", {"model_id": run, "seq_id": 1, "path": "kept"}), self.wire)
        self.wire.http.put(f"sessions/{self.sessions[1]}/project", json={"project_id": "alpha"})
        self.published = world.run(world.other)
        body = {"model_id": self.published, "seq_id": 1, "path": "open"}
        world.settle(world.other.post("save_weights", body), world.other)
        world.other.http.post(f"training_runs/{self.published}/checkpoints/weights/open/publish")


def shelf(world: World) -> Shelf:
    """The world's one."""
    found = world.things.get("shelf")
    if found is None:
        found = world.things["shelf"] = Shelf(world)
    return found


def search(world: World, changes: Changes) -> Any:
    """`sessions/search` of those things: which are found."""
    body = {"limit": 50, **{key: _dated(world, value) for key, value in changes.items()}}
    found = world.json(shelf(world).wire.post("sessions/search", body))
    if isinstance(found, Refusal):
        return found
    return [shelf(world).sessions.index(each["session_id"]) for each in found["sessions"]]


def _dated(world: World, value: Any) -> Any:
    """A cursor `{"after": i, …}`: behind the i-th session, newest first, perhaps with fields changed."""
    if isinstance(value, dict) and "after" in value:
        found = shelf(world).wire.post("sessions/search", {"limit": value["after"] + 1}).json()
        return {**found["next_cursor"], **{key: field for key, field in value.items() if key != "after"}}
    return value


def hours(back: int, ahead: int) -> dict[str, str]:
    """A billing window of whole hours around now."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return {
        "starting_on": (now - timedelta(hours=back)).isoformat(),
        "ending_before": (now + timedelta(hours=ahead)).isoformat(),
    }
