"""What each field of the requests about sessions, checkpoints and lists does."""

from __future__ import annotations

from tests.e2e.field_checks import Check, decides, differs, inert, refused
from tests.e2e.field_probes_rest import (
    assign_project,
    copy_weights,
    create_session,
    finish,
    hours,
    keyed,
    posted,
    queried,
    repeated,
    search,
    set_ttl,
)

heartbeat = posted("session_heartbeat", session_id="$session", type="session_heartbeat")
get_info = posted("get_info", model_id="$trained_run", type="get_info")
unload = posted("unload_model", model_id="$spare_run", type="unload_model")
weights_info = posted("weights_info", tinker_path="$weights")
telemetry = posted("telemetry", events=[], platform="x", sdk_version="0.38.0", session_id="x", process_uuid="x")
client_config = posted("client/config", sdk_version="0.38.0")
BILLING, NOW = queried("billing/usage/events"), hours(1, 3)
"""The window is reckoned when the tests are collected, and must hold for as long as they take."""
FACTS = "what a client says about itself; nothing is decided by it"
UNSHARED = "nobody can share a session, so the accessible ones are one's own"
EVENT = {"event": "GENERIC_EVENT", "event_id": "1", "event_session_index": 0, "severity": "INFO"}
EVENTS = {
    "GenericEvent": ("event", "event_data", "event_id", "event_name", "event_session_index", "severity", "timestamp"),
    "SessionStartEvent": ("event", "event_id", "event_session_index", "severity", "timestamp"),
    "SessionEndEvent": ("duration", "event", "event_id", "event_session_index", "severity", "timestamp"),
    "UnhandledExceptionEvent": (
        "error_message",
        "error_type",
        "event",
        "event_id",
        "event_session_index",
        "severity",
        "timestamp",
        "traceback",
    ),
}

SESSIONS: tuple[Check, ...] = (
    differs("CreateSessionRequest.tags", create_session, {"tags": ["a"]}, {}),
    differs("CreateSessionRequest.user_metadata", create_session, {"user_metadata": {"a": 1}}, {}),
    differs("CreateSessionRequest.project_id", create_session, {"project_id": "alpha"}, {}),
    differs("CreateSessionRequest.display_name", create_session, {"display_name": "fox"}, {}),
    inert("CreateSessionRequest.sdk_version", create_session, {"sdk_version": "0.1"}, {}, why=FACTS),
    refused("CreateSessionRequest.sdk_version", create_session, {"sdk_version": "x" * 65}),
    refused("CreateSessionRequest.type", create_session, {"type": "session"}),
    refused("SessionHeartbeatRequest.session_id", heartbeat, {"session_id": "nobody"}),
    refused("SessionHeartbeatRequest.type", heartbeat, {"type": "x"}),
    differs("FinishSession.reason & FinishReason.type", finish, {"reason.type": "errored"}, {}),
    refused("FinishReason.type", finish, {"reason.type": "bored"}, "reason.type"),
    differs("FinishSession.detail", finish, {"detail": "because"}, {}),
    differs("AssignProject.project_id", assign_project, {"project_id": "beta"}, {}),
    inert("ClientConfigRequest.sdk_version", client_config, {"sdk_version": "0.1"}, {}, why=FACTS),
    *(
        inert(f"TelemetrySendRequest.{name}", telemetry, {name: "y"}, {}, why=FACTS)
        for name in ("platform", "sdk_version", "session_id", "process_uuid")
    ),
    inert(
        " & ".join(["TelemetrySendRequest.events", *(f"{event}.{name}" for event in EVENTS for name in EVENTS[event])]),
        telemetry,
        {"events": [EVENT]},
        {},
        why="the SDK's telemetry is taken and not kept",
    ),
    refused("TelemetrySendRequest.events", telemetry, {"events": "x"}),
    refused("GetInfoRequest.model_id", get_info, {"model_id": "nobody:train:0"}),
    refused("GetInfoRequest.type", get_info, {"type": "info"}),
    refused("UnloadModelRequest.model_id", unload, {"model_id": "nobody:train:0"}),
    refused("UnloadModelRequest.type", unload, {"type": "unload"}),
)

SEARCH: tuple[Check, ...] = (
    differs("SessionSearchRequest.session_id", search, {"session_id": "nobody"}, {}),
    differs("SessionSearchRequest.project_ids", search, {"project_ids": ["alpha"]}, {}),
    differs("SessionSearchRequest.user_metadata", search, {"user_metadata": {"a": "1"}}, {}),
    differs("SessionSearchRequest.display_name", search, {"display_name": "red"}, {}),
    differs(
        "SessionSearchRequest.owner & UserSearchOwner.type & UserSearchOwner.owner_urns & OwnSearchOwner.type",
        search,
        {"owner": {"type": "user", "owner_urns": ["urn:x"]}},
        {"owner": {"type": "own"}},
    ),
    inert(
        "AccessibleSearchOwner.type",
        search,
        {"owner": {"type": "accessible"}},
        {"owner": {"type": "own"}},
        why=UNSHARED,
    ),
    refused("AccessibleSearchOwner.type", search, {"owner": {"type": "all"}}, "owner"),
    differs(
        "SessionSearchRequest.statuses & ActiveSessionStatusQuery.type & ClientFinishedSessionStatusQuery.type",
        search,
        {"statuses": [{"type": "active"}]},
        {"statuses": [{"type": "client_finished"}]},
    ),
    *(
        differs(f"{name}SessionStatusQuery.type", search, {"statuses": [{"type": kind}]}, {})
        for name, kind in (("Cancelled", "cancelled"), ("Failed", "failed"))
    ),
    differs(
        "ClientFinishedSessionStatusQuery.reasons",
        search,
        {"statuses": [{"type": "client_finished", "reasons": ["success"]}]},
        {"statuses": [{"type": "client_finished"}]},
    ),
    refused("SessionSearchRequest.statuses", search, {"statuses": [{"type": "odd"}]}),
    differs("SessionSearchRequest.limit", search, {"limit": 1}, {}),
    refused("SessionSearchRequest.limit", search, {"limit": 201}),
    differs("SessionSearchRequest.cursor", search, {"cursor": {"after": 0}}, {}),
    differs(
        "SessionSearchCursor.last_created_at",
        search,
        {"cursor": {"after": 0, "last_created_at": "2020-01-01T00:00:00Z"}},
        {"cursor": {"after": 0}},
    ),
    refused("SessionSearchCursor.last_session_id", search, {"cursor": {"after": 0, "last_session_id": 7}}),
)

CHECKPOINTS: tuple[Check, ...] = (
    refused("AskWeightsInfo.tinker_path", weights_info, {"tinker_path": "tinker://nobody:train:0/weights/x"}),
    differs("SetTtl.ttl_seconds", set_ttl, {"ttl_seconds": None}, {}),
    refused("SetTtl.ttl_seconds", set_ttl, {"ttl_seconds": 60}),
    differs("CopyWeightsRequest.source_path", copy_weights, {"source_path": "$later_weights"}, {}),
    refused("CopyWeightsRequest.source_path", copy_weights, {"source_path": "tinker://nobody:train:0/weights/x"}),
    differs(
        "CopyWeightsRequest.destination_project_id",
        copy_weights,
        {"destination_project_id": "gamma"},
        {"destination_project_id": "delta"},
    ),
    differs(
        "CopyWeightsRequest.session_id & CopyWeightsRequest.model_seq_id",
        copy_weights,
        {"session_id": "$session", "model_seq_id": 601},
        {},
    ),
    refused("CopyWeightsRequest.session_id", copy_weights, {"session_id": "nobody", "model_seq_id": 602}),
    differs(
        "CopyWeightsRequest.model_seq_id",
        copy_weights,
        {"session_id": "$session", "model_seq_id": 603},
        {"session_id": "$session", "model_seq_id": 604},
    ),
    differs("CopyWeightsRequest.ttl_seconds", copy_weights, {"ttl_seconds": 7200}, {}),
    refused("CopyWeightsRequest.ttl_seconds", copy_weights, {"ttl_seconds": 60}),
    refused("CopyWeightsRequest.weights_access_token", copy_weights, {"weights_access_token": "tml-x"}),
    decides(
        "POST copy_weights x-tinker-weights-access-token:",
        copy_weights,
        {"source_path": "$others_weights", "header": "$other_key"},
        {"source_path": "$others_weights"},
        "source_path",
    ),
    differs(
        "POST copy_weights x-idempotency-key:",
        repeated("copy_weights", source_path="$weights", destination_project_id="alpha"),
        {"same": True},
        {"same": False},
    ),
    differs("POST create_session x-idempotency-key:", repeated("create_session"), {"same": True}, {"same": False}),
)

KEYS: tuple[Check, ...] = (
    decides("GET auth/apikey/me x-api-key:", keyed("GET", "auth/apikey/me"), {"key": "$key"}, {"key": ""}, "X-API-Key"),
    decides("POST auth/token x-api-key:", keyed("POST", "auth/token"), {"key": "$key"}, {"key": ""}, "X-API-Key"),
    refused("DELETE auth/apikey/me x-api-key:", keyed("DELETE", "auth/apikey/me"), {"key": "$key"}, "X-API-Key"),
)

QUERIES: tuple[Check, ...] = (
    *(
        check
        for route in ("checkpoints", "sessions", "training_runs")
        for check in (
            differs(f"GET {route}?limit", queried(route), {"limit": 1}, {}),
            refused(f"GET {route}?limit", queried(route), {"limit": 0}, "limit"),
            differs(f"GET {route}?offset", queried(route), {"offset": 1}, {}),
            refused(f"GET {route}?offset", queried(route), {"offset": -1}, "offset"),
        )
    ),
    refused("GET sessions?access_scope", queried("sessions"), {"access_scope": "all"}, "access_scope"),
    differs("GET training_runs?access_scope", queried("training_runs"), {"access_scope": "accessible"}, {}),
    decides(
        "GET training_runs/{training_run_id}?access_scope",
        queried("training_runs/{published}"),
        {"access_scope": "accessible"},
        {"access_scope": "owned"},
        "training_run_id",
    ),
    *(
        inert(f"GET {route}?access_scope", queried(path), {"access_scope": "accessible"}, {}, why=UNSHARED)
        for route, path in (("sessions", "sessions"), ("sessions/{session_id}", "sessions/{session}"))
    ),
    refused("GET training_runs?access_scope", queried("training_runs"), {"access_scope": "all"}, "access_scope"),
    differs("GET training_runs?project_id", queried("training_runs"), {"project_id": "alpha"}, {}),
    refused(
        "GET sessions/{session_id}?access_scope", queried("sessions/{session}"), {"access_scope": "all"}, "access_scope"
    ),
    refused(
        "GET training_runs/{training_run_id}?access_scope",
        queried("training_runs/{run}"),
        {"access_scope": "all"},
        "access_scope",
    ),
    differs("GET audit?event_type", queried("audit"), {"event_type": "projects"}, {"event_type": "checkpoints"}),
    refused("GET audit?event_type", queried("audit"), {"event_type": "x"}, "event_type"),
    differs("GET audit?day", queried("audit"), {"day": "2020-01-01"}, {}),
    refused("GET audit?day", queried("audit"), {"day": "x"}, "day"),
    differs(
        "GET billing/usage/events?starting_on & GET billing/usage/events?ending_before"
        " & GetBillingUsageRequest.starting_on & GetBillingUsageRequest.ending_before",
        BILLING,
        NOW,
        hours(3, -1),
    ),
    refused("GET billing/usage/events?starting_on", BILLING, {"ending_before": NOW["ending_before"]}, "starting_on"),
    refused("GET billing/usage/events?ending_before", BILLING, {"starting_on": NOW["starting_on"]}, "ending_before"),
    differs(
        "GET billing/usage/checkpoints/current?project_id & GetCurrentCheckpointStorageUsageRequest.project_id",
        queried("billing/usage/checkpoints/current"),
        {"project_id": "nothing"},
        {},
    ),
)

REST = (*SESSIONS, *SEARCH, *CHECKPOINTS, *KEYS, *QUERIES)
