"""Managing runs, checkpoints and sessions: the official RestClient and the `tinker` command."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker
from tinker import types

from app.wire import perfetto_pb2
from tests.e2e.conftest import MODEL
from tests.e2e.data import largest_gap, logprobs
from tests.e2e.service import Service
from tests.e2e.tenant import DATA, Tenant


@pytest.fixture
def tenant(service: Service) -> Callable[[], Tenant]:
    """Makes tenants."""
    return lambda: Tenant(service.base_url, f"tml-{uuid.uuid4().hex}")


@pytest.fixture
def ada(tenant: Callable[[], Tenant]) -> Tenant:
    return tenant()


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(tinker.APIStatusError) as error:
        yield
    assert 400 <= error.value.status_code < 500
    for word in words:
        assert word in str(error.value)


def test_runs_are_listed_in_pages_and_shown(ada: Tenant) -> None:
    service = ada.connect(user_metadata={"purpose": "test"})
    runs = [service.create_lora_training_client(base_model=MODEL, rank=4).result(60) for _ in range(3)]
    first = ada.rest.list_training_runs(limit=2).result(10)
    second = ada.rest.list_training_runs(limit=2, offset=2).result(10)
    listed = [run.training_run_id for run in (*first.training_runs, *second.training_runs)]
    assert listed == [run.model_id for run in reversed(runs)]
    assert (second.cursor.total_count, second.cursor.offset) == (3, 2)
    shown = ada.rest.get_training_run(listed[0], access_scope="accessible").result(10)
    assert (shown.base_model, shown.is_lora, shown.lora_rank, shown.corrupted) == (MODEL, True, 4, False)
    assert datetime.now(UTC) - shown.last_request_time < timedelta(minutes=2)


def test_metadata_of_any_kind_comes_back_as_text(ada: Tenant) -> None:
    run = ada.run(user_metadata={"renderer_name": "role_colon", "epochs": 3})
    shown = ada.rest.get_training_run(run.model_id).result(10)
    assert shown.user_metadata == {"renderer_name": "role_colon", "epochs": "3"}


def test_checkpoints_live_and_die(ada: Tenant) -> None:
    run = ada.run()
    training = run.save_state("one", ttl_seconds=3600).result(60).path
    sampling = run.save_weights_for_sampler("one").result(60).path
    rest = ada.rest
    listed = rest.list_checkpoints(run.model_id).result(10).checkpoints
    assert [(c.tinker_path, c.checkpoint_type) for c in listed] == [(sampling, "sampler"), (training, "training")]
    assert all(checkpoint.size_bytes for checkpoint in listed)
    assert (listed[0].expires_at, listed[1].expires_at is not None) == (None, True)
    shown = rest.get_training_run_by_tinker_path(training).result(10)
    assert shown.last_checkpoint is not None and shown.last_checkpoint.tinker_path == training
    assert shown.last_sampler_checkpoint is not None and shown.last_sampler_checkpoint.tinker_path == sampling
    rest.set_checkpoint_ttl_from_tinker_path(training, None).result(10)
    rest.set_checkpoint_ttl_from_tinker_path(sampling, 7200).result(10)
    newest, oldest = rest.list_user_checkpoints(limit=10).result(10).checkpoints
    assert (newest.expires_at is not None, oldest.expires_at) == (True, None)
    with refused("ttl_seconds"):
        rest.set_checkpoint_ttl_from_tinker_path(training, 60).result(10)
    rest.delete_checkpoint_from_tinker_path(training).result(10)
    rest.delete_checkpoint(run.model_id, "sampler_weights/one").result(10)
    assert rest.list_checkpoints(run.model_id).result(10).checkpoints == []
    with refused("no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(training).result(10)


def test_a_sampler_outlives_its_deleted_checkpoint(ada: Tenant) -> None:
    run = ada.run()
    path = run.save_weights_for_sampler("gone").result(60).path
    sampler = ada.connect().create_sampling_client(model_path=path)
    ada.rest.delete_checkpoint_from_tinker_path(path).result(10)
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    assert sampler.sample(prompt, num_samples=1, sampling_params=params).result(60).sequences[0].tokens
    assert run.save_weights_for_sampler("gone").result(60).path == path


def test_a_published_checkpoint_is_for_everybody_to_read(tenant: Callable[[], Tenant]) -> None:
    ada, bob = tenant(), tenant()
    run = ada.run()
    path = run.save_state("public").result(60).path
    with refused("no checkpoint"):
        bob.rest.get_weights_info_by_tinker_path(path).result(10)
    for _ in range(2):
        ada.rest.publish_checkpoint_from_tinker_path(path).result(10)
    assert bob.rest.get_weights_info_by_tinker_path(path).result(10).lora_rank == 8
    theirs = bob.connect().create_training_client_from_state_with_optimizer(path).result(60)
    assert largest_gap(logprobs(run, DATA), logprobs(theirs, DATA)) < 1e-5
    sampler = bob.connect().create_sampling_client(model_path=path)
    assert len(sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result(60)) == 3
    for change in (bob.rest.delete_checkpoint_from_tinker_path, bob.rest.unpublish_checkpoint_from_tinker_path):
        with refused("no checkpoint"):
            change(path).result(10)
    for _ in range(2):
        ada.rest.unpublish_checkpoint_from_tinker_path(path).result(10)
    with pytest.raises(tinker.TinkerError, match="no checkpoint"):
        bob.connect().create_training_client_from_state(path).result(60)


def test_a_copy_is_the_same_weights(ada: Tenant) -> None:
    run = ada.run()
    source = run.save_state("source").result(60).path
    path = ada.rest.copy_weights(source, "archive", ttl_seconds=3600).result(10)
    ada.rest.delete_checkpoint_from_tinker_path(source).result(10)
    loaded = ada.connect().create_training_client_from_state_with_optimizer(path).result(60)
    assert largest_gap(logprobs(run, DATA), logprobs(loaded, DATA)) < 1e-5
    (listed,) = ada.rest.list_training_runs(project_id="archive").result(10).training_runs
    assert listed.last_checkpoint is not None and listed.last_checkpoint.tinker_path == path
    with refused("weights_access_token"):
        ada.rest.copy_weights(path, "archive", weights_access_token="tok").result(10)


@pytest.mark.filterwarnings("ignore")
def test_sessions_are_listed_searched_and_moved(ada: Tenant) -> None:
    service = ada.connect(user_metadata={"team": "red"})
    run = service.create_lora_training_client(base_model=MODEL, rank=4).result(60)
    session_id = run.model_id.partition(":")[0]
    sampler = service.create_sampling_client(base_model=MODEL)
    sampler.compute_logprobs(types.ModelInput.from_ints([5, 6])).result(60)
    other = ada.run().model_id.partition(":")[0]
    rest = ada.rest
    assert rest.list_sessions(limit=1).result(10).sessions == [other]
    assert rest.list_sessions(limit=1, offset=1, access_scope="accessible").result(10).sessions == [session_id]
    shown = rest.get_session(session_id).result(10)
    assert (shown.training_run_ids, shown.user_metadata) == ([run.model_id], {"team": "red"})
    assert [rest.get_sampler(i).result(10).base_model for i in shown.sampler_ids]
    rest.assign_session_project(session_id, "moved").result(10)
    active = [types.ActiveSessionStatusQuery()]
    request = types.SessionSearchRequest(user_metadata={"team": "red"}, project_ids=["moved"], statuses=active)
    (found,) = rest.search_sessions(request).result(10).sessions
    assert (found.session_id, found.project_id) == (session_id, "moved")
    page = rest.search_sessions(types.SessionSearchRequest(limit=1)).result(10)
    assert page.next_cursor is not None
    rest_of_it = rest.search_sessions(types.SessionSearchRequest(limit=1, cursor=page.next_cursor)).result(10)
    assert [s.session_id for s in (*page.sessions, *rest_of_it.sessions)] == [other, session_id]
    assert rest_of_it.next_cursor is None
    service.close("success").result(10)
    finished = [types.ClientFinishedSessionStatusQuery(reasons=["success"])]
    (found,) = rest.search_sessions(types.SessionSearchRequest(statuses=finished)).result(10).sessions
    assert found.session_id == session_id


def test_a_session_is_exported_as_a_trace(ada: Tenant, tmp_path: Path) -> None:
    run = ada.run()
    target = tmp_path / "session.pftrace"
    ada.command("session", "export-trace", run.model_id.partition(":")[0], "--output", str(target))
    packets = perfetto_pb2.Trace.FromString(target.read_bytes()).packet
    assert packets[0].track_descriptor.name == run.model_id
    begun = [p.track_event.name for p in packets if p.track_event.type == 1]
    assert begun == ["create_model", "forward_backward", "optim_step"]


def test_nobody_sees_what_is_somebody_elses(tenant: Callable[[], Tenant]) -> None:
    ada, bob = tenant(), tenant()
    run = ada.run()
    path = run.save_state("mine").result(60).path
    rest = bob.rest
    session_id = run.model_id.partition(":")[0]
    for ask in (
        lambda: rest.get_training_run(run.model_id),
        lambda: rest.list_checkpoints(run.model_id),
        lambda: rest.get_session(session_id),
        lambda: rest.assign_session_project(session_id, "p"),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 3600),
        lambda: rest.copy_weights(path, "p"),
    ):
        with pytest.raises(tinker.NotFoundError):
            ask().result(10)
    assert rest.list_sessions(access_scope="accessible").result(10).sessions == []
    assert rest.list_user_checkpoints().result(10).checkpoints == []


def test_the_command_line_manages_runs_and_checkpoints(ada: Tenant) -> None:
    run = ada.run()
    path = run.save_state("cli").result(60).path
    run.save_weights_for_sampler("cli").result(60)
    assert [row["training_run_id"] for row in ada.told("run", "list")["runs"]] == [run.model_id]
    assert "1 training run" in ada.command("run", "list", "--limit", "0")
    assert ada.told("run", "info", run.model_id)["lora_rank"] == 8
    assert len(ada.told("checkpoint", "list")["checkpoints"]) == 2
    ada.told("checkpoint", "publish", path)
    ada.told("checkpoint", "set-ttl", path, "--ttl", "3600")
    listed = ada.told("checkpoint", "list", "--run-id", run.model_id)["checkpoints"]
    assert [(row["tinker_path"] == path, row["public"], bool(row["expires_at"])) for row in listed] == [
        (False, False, False),
        (True, True, True),
    ]
    assert ada.told("checkpoint", "info", path)["tinker_path"] == path
    ada.told("checkpoint", "unpublish", path)
    ada.told("checkpoint", "set-ttl", path, "--remove")
    assert ada.rest.list_checkpoints(run.model_id).result(10).checkpoints[1].public is False
    assert ada.told("checkpoint", "delete", path, "-y") == {"deleted_count": 1, "failed": []}
    assert "Deleted 1" in ada.command("checkpoint", "delete", "--run-id", run.model_id, "-y")
    assert ada.told("checkpoint", "list")["checkpoints"] == []


def test_the_command_line_tells_what_is_refused(ada: Tenant) -> None:
    assert "there is no session" in ada.failed("session", "export-trace", "nobody")
    assert "there is no run" in ada.failed("run", "info", "nobody:train:0")
    assert "there is no checkpoint" in ada.failed("checkpoint", "publish", "tinker://nobody:train:0/weights/x")


def test_the_command_works_in_a_process_of_its_own(ada: Tenant) -> None:
    command = [Path(sys.executable).with_name("tinker"), "checkpoint", "list"]
    result = subprocess.run(command, env={**os.environ, **ada.environment}, capture_output=True, text=True, timeout=60)
    assert "No checkpoints found" in result.stdout, result.stderr  # not the exit code: see `cli` in test_tokens
