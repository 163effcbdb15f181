"""Sampling over HTTP: whose sampler it is, what is checked before a sample is stored, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from app.checkpoints.models import Snapshot
from app.db import utc_now
from app.recent import Recent
from app.runs.models import Run
from app.sampling.models import SamplingSession
from app.sampling.store import SampleAnswer, SampleDesk
from app.wire.sampling import decode_stored
from app.wire.types import PromptTargets
from tests.factories import CONTEXT, POOL, VOCABULARY, add_checkpoint
from tests.integration.conftest import PROTOBUF, Api, running


def sampler_body(session_id: str, number: int = 0, **fields: object) -> dict[str, object]:
    body = {"session_id": session_id, "sampling_session_seq_id": number, "type": "create_sampling_session"}
    return body | (fields or {"base_model": "tiny"})


@pytest.fixture
def sampler(api: Api) -> str:
    """A sampling session of the base model."""
    return str(api.ok("create_sampling_session", sampler_body(api.session()))["sampling_session_id"])


@pytest.fixture
def desk(redis_url: str) -> Iterator[SampleDesk]:
    with redis.Redis.from_url(redis_url) as client:
        yield SampleDesk(client, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)


def sample(sampler: str, seq_id: int = 0, **fields: object) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]},
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "num_samples": 2,
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "type": "sample",
    }
    return body | fields


# -- samplers


def test_a_repeated_sampler_is_the_same(each_api: Api) -> None:
    session_id = each_api.session()
    answers = [each_api.ok("create_sampling_session", sampler_body(session_id)) for _ in range(2)]
    assert answers[0] == answers[1]


def test_a_sampler_number_that_names_another_model_is_a_conflict(api: Api) -> None:
    model_id = api.run()
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id), kind="sampler_weights")
    session_id = api.session()
    api.ok("create_sampling_session", sampler_body(session_id))
    other = sampler_body(session_id, model_path=f"tinker://{model_id}/sampler_weights/first")
    assert api.post("create_sampling_session", other).status_code == 409


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_a_sampler_of_a_checkpoint_tells_its_model_and_path(api: Api, kind: str) -> None:
    model_id = api.run()
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id), kind=kind)
    path = f"tinker://{model_id}/{kind}/first"
    identity = api.ok("create_sampling_session", sampler_body(api.session(), model_path=path))["sampling_session_id"]
    told = api.get(f"/api/v1/samplers/{identity}").json()
    assert told == {"sampler_id": identity, "base_model": "tiny", "model_path": path}


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"base_model": "no/such"}, 400, "base_model: no worker serves"),
        ({"base_model": "tiny", "model_path": "tinker://a/weights/b"}, 400, "exactly one of"),
        ({"model_path": "weights/b"}, 400, "model_path: 'weights/b' is not of the form"),
        ({"model_path": "tinker://a/weights/b"}, 404, "model_path: there is no checkpoint"),
        ({"base_model": "tiny", "temperature": 1}, 422, "temperature: unknown field"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused_by_field(
    api: Api, fields: dict[str, object], status: int, words: str
) -> None:
    answer = api.post("create_sampling_session", sampler_body(api.session(), **fields))
    assert answer.status_code == status
    assert words in answer.json()["detail"]


def test_somebody_elses_sampler_is_not_there(api: Api, sampler: str) -> None:
    request_id = api.ok("asample", sample(sampler))["request_id"]
    assert api.get(f"/api/v1/samplers/{sampler}", who="bob").status_code == 404
    assert api.post("asample", sample(sampler), who="bob").status_code == 404
    assert api.poll(request_id, who="bob").status_code == 404


def test_somebody_elses_checkpoint_cannot_be_sampled(api: Api) -> None:
    theirs = api.run("bob")
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, theirs))
    body = sampler_body(api.session(), model_path=f"tinker://{theirs}/weights/first")
    assert api.post("create_sampling_session", body).status_code == 404


# -- samples


def test_a_sample_names_its_sequences_and_a_repeat_names_the_same(api: Api, sampler: str) -> None:
    first, again = (api.ok("asample", sample(sampler)) for _ in range(2))
    assert first == again
    assert len(set(first["sample_sequence_ids"])) == 2
    other = api.ok("asample", sample(sampler, 1))
    assert not set(first["sample_sequence_ids"]) & set(other["sample_sequence_ids"])


def test_another_sample_with_the_same_number_is_a_conflict(api: Api, sampler: str) -> None:
    api.ok("asample", sample(sampler))
    assert api.post("asample", sample(sampler, num_samples=3)).status_code == 409


def test_numbers_and_seeds_may_have_64_bits(api: Api, sampler: str) -> None:
    body = sample(sampler, 2**63 - 1, sampling_params={"seed": 2**64 - 1})
    assert api.ok("asample", body)["request_id"].endswith(str(2**63 - 1))


def test_a_sample_waits_as_it_was_asked_for(api: Api, sampler: str, desk: SampleDesk) -> None:
    fields = {"sampling_params": {"stop": ["\n", "END"], "seed": 7, "temperature": 0}, "prompt_logprobs": True}
    request_id = api.ok("asample", sample(sampler, **fields))["request_id"]
    (claimed,) = desk.claim([request_id])
    stored = decode_stored(claimed.body)
    assert (stored.pool, stored.snapshot_id) == (POOL, None)
    assert list(stored.request.prompt) == [1, 2, 3]
    assert (stored.request.num_samples, stored.request.prompt_logprobs) == (2, True)
    params = stored.request.params
    assert (params.stop_strings, params.stop_tokens, params.seed, params.temperature) == (("\n", "END"), (), 7, 0)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_what_is_asked_about_a_prompt_waits_as_it_was_asked(
    api: Api, sampler: str, desk: SampleDesk, form: str
) -> None:
    named = targets([4, -1, 5, 6]) if form == "dense" else targets([4, 5], [0, 1, 2], [1, 0])
    body = sample(sampler, **named, prompt_alt_tokens_k=3, record_stability_info=True)
    answers = [api.ok("asample", body) for _ in range(2)]
    assert answers[0] == answers[1]
    (claimed,) = desk.claim([answers[0]["request_id"]])
    request = decode_stored(claimed.body).request
    expected = {
        "dense": PromptTargets((2, 2), [4, -1, 5, 6]),
        "sparse": PromptTargets((2, 2), [4, 5], [0, 1, 2], [1, 0]),
    }
    assert request.target_prompt_logprobs == expected[form]
    assert (request.prompt_alt_tokens_k, request.record) == (3, True)
    assert api.post("asample", body | targets([4, -1, 5, 7])).status_code == 409


STOPS: dict[str, tuple[object, tuple[int, ...] | None, tuple[str, ...] | None]] = {
    "none": (None, None, None),
    "empty": ([], (), ()),
    "text": ("\n", (), ("\n",)),
    "texts": (["a", "b"], (), ("a", "b")),
    "tokens": ([3, 4], (3, 4), ()),
}


@pytest.mark.parametrize("case", STOPS)
def test_every_form_of_stop_is_understood(api: Api, sampler: str, desk: SampleDesk, case: str) -> None:
    stop, tokens, strings = STOPS[case]
    params = {} if stop is None else {"stop": stop}
    (claimed,) = desk.claim([api.ok("asample", sample(sampler, sampling_params=params))["request_id"]])
    found = decode_stored(claimed.body).request.params
    assert (found.stop_tokens, found.stop_strings) == (tokens, strings)


def prompt(*tokens: int) -> dict[str, object]:
    return {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}}


def chunk(**fields: object) -> dict[str, object]:
    return {"prompt": {"chunks": [fields]}}


def targets(
    data: list[float],
    crow: list[int] | None = None,
    col: list[int] | None = None,
    *,
    dtype: str = "int64",
    shape: Sequence[int] | None = (2, -1),
) -> dict[str, object]:
    """For a prompt of three tokens: dense, or sparse with as many columns as values."""
    sparse = {"sparse_crow_indices": crow, "sparse_col_indices": col}
    if shape == (2, -1):
        shape = [2, len(data) // 2 if crow is None else len(data)]
    return {"target_prompt_logprobs": {"data": data, "dtype": dtype, "shape": shape} | sparse}


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "token": (prompt(VOCABULARY), f"prompt: token {VOCABULARY} is outside"),
    "negative token": (prompt(-1), "prompt.chunks.0.tokens.0"),
    "no tokens": (prompt(), "prompt: has no tokens"),
    "no room": (prompt(*[1] * CONTEXT), f"prompt: {CONTEXT} tokens leave no room"),
    "image": (chunk(type="image", data="", format="png"), "prompt.chunks.0: image chunks are not supported"),
    "pointer": (chunk(type="image_asset_pointer", location="x", format="png"), "0: image_asset_pointer chunks are not"),
    "audio": (chunk(type="dmel", dmel=""), "prompt.chunks.0: dmel chunks are not supported"),
    "odd chunk": (chunk(type=3, tokens=[1]), "prompt.chunks.0.type"),
    "temperature": ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    "top_p": ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    "max_tokens": ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    "parameter": ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: unknown field"),
    "empty stop": ({"sampling_params": {"stop": [""]}}, "sampling_params.stop: "),
    "stop token": ({"sampling_params": {"stop": [VOCABULARY]}}, "sampling_params.stop: "),
    "many stops": ({"sampling_params": {"stop": ["x"] * 257}}, "sampling_params.stop: at most 256"),
    "long stop": ({"sampling_params": {"stop": ["x" * 1025]}}, "sampling_params.stop: at most 256"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "field": ({"logit_bias": {}}, "logit_bias: unknown field"),
    "model": ({"base_model": "tiny"}, "base_model: not supported in a sample"),
    "path": ({"model_path": "tinker://a/weights/b"}, "model_path: not supported in a sample"),
    "seed": ({"sampling_params": {"seed": 2**64}}, "sampling_params.seed"),
    "last of nothing": ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: needs prompt_logprobs"),
    "last too many": ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n: only 2 tokens"),
    "negative alternatives": ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
    "alternatives": ({"prompt_alt_tokens_k": 2**21}, "prompt_alt_tokens_k: at most"),
    "targets of another kind": (targets([1, 2], dtype="float32"), "target_prompt_logprobs.dtype"),
    "no targets": ({"target_prompt_logprobs": {}}, "target_prompt_logprobs.data"),
    "shapeless targets": (targets([1, 2], shape=None), "target_prompt_logprobs.shape"),
    "flat targets": (targets([1, 2], shape=[2]), "target_prompt_logprobs.shape"),
    "targets of the first token": (
        targets([1, 2, 3], shape=[3, 1]),
        "target_prompt_logprobs.shape: [3, 1] must be [2, K]",
    ),
    "too few targets": (targets([1, 2], shape=[2, 2]), "target_prompt_logprobs.data: 2 values do not fill"),
    "target": (targets([1, VOCABULARY]), f"target_prompt_logprobs.data: token {VOCABULARY} is outside"),
    "negative target": (targets([1, -2]), "target_prompt_logprobs.data.1"),
    "fraction of a target": (targets([1, 1.5]), "target_prompt_logprobs.data.1"),
    "only empty targets": (targets([-1, -1]), "target_prompt_logprobs.data: names no token"),
    "no columns of targets": (targets([], shape=[2, 0]), "target_prompt_logprobs.data: names no token"),
    "half a sparse matrix": (targets([1], [0, 1, 1]), "target_prompt_logprobs: sparse_crow_indices and sparse_col"),
    "rows of a sparse matrix": (targets([1], [0, 1], [0]), "target_prompt_logprobs.sparse_crow_indices"),
    "order of sparse rows": (targets([1, 2], [0, 3, 2], [0, 1]), "target_prompt_logprobs.sparse_crow_indices"),
    "end of sparse rows": (targets([1, 2], [0, 1, 1], [0, 0]), "target_prompt_logprobs.sparse_crow_indices"),
    "sparse column": (targets([1, 2], [0, 1, 2], [0, 5]), "target_prompt_logprobs.sparse_col_indices: 5 is outside"),
    "sparse columns": (targets([1, 2], [0, 1, 2], [0]), "target_prompt_logprobs.sparse_col_indices: 1 for 2"),
    "order of sparse columns": (targets([1, 2], [0, 2, 2], [1, 1]), "target_prompt_logprobs.sparse_col_indices: they"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_sample_that_cannot_be_is_refused_by_field(api: Api, sampler: str, case: str) -> None:
    fields, words = WRONG[case]
    answer = api.post("asample", sample(sampler, **fields))
    assert answer.status_code in (400, 422)
    assert words in answer.json()["detail"]


@pytest.mark.parametrize("fields", [{"num_samples": 8}, {"num_samples": 1, "sampling_params": {"max_tokens": 8}}])
def test_alternatives_of_more_tokens_than_fit_into_memory_are_refused(
    api: Api, sampler: str, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    monkeypatch.setattr("app.sampling.checks.MAX_SAMPLED_CELLS", 20)
    few: dict[str, object] = {"sampling_params": {"max_tokens": 1}, "topk_sample_logprobs": 3}
    answer = api.post("asample", sample(sampler, **few | fields))
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("topk_sample_logprobs: at most 2 for num_samples times max_tokens")
    assert api.post("asample", sample(sampler, **few)).status_code == 200


def test_a_finished_sample_is_answered_as_often_as_asked(api: Api, sampler: str, desk: SampleDesk) -> None:
    request_id = api.ok("asample", sample(sampler))["request_id"]
    assert api.poll(request_id).status_code == 408
    desk.finish([(request_id, SampleAnswer("proto", b"sequences"))])
    for _ in range(2):
        answer = api.poll(request_id)
        assert (answer.content, answer.headers["content-type"]) == (b"sequences", PROTOBUF)


def test_a_failed_sample_says_why(api: Api, sampler: str, desk: SampleDesk) -> None:
    request_id = api.ok("asample", sample(sampler))["request_id"]
    desk.finish([(request_id, SampleAnswer.failed("no such adapter", "user"))])
    assert api.poll(request_id).json() == {"error": "no such adapter", "category": "user"}


def test_a_sample_that_redis_lost_is_gone_and_can_be_sent_again(api: Api, sampler: str, redis_url: str) -> None:
    request_id = api.ok("asample", sample(sampler))["request_id"]
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    assert api.poll(request_id).status_code == 410
    assert api.ok("asample", sample(sampler))["request_id"] == request_id


def sampler_of(run: Run, **columns: Any) -> SamplingSession:
    """The row of the first sampling session of a run's session."""
    columns |= {"owner_id": run.owner_id, "session_id": run.session_id, "seq_id": 0, "base_model": "tiny", "pool": POOL}
    return SamplingSession(id=f"{run.session_id}:sample:0", **columns)


def test_a_client_of_inflight_weights_samples_the_newest_at_its_submit(api: Api, desk: SampleDesk) -> None:
    model_id = api.run()
    with api.database.write() as session:
        run = session.get_one(Run, model_id)
        run.sampler_snapshot_id = "old"
        row = sampler_of(run, snapshot_id="first", follows_model_id=model_id)
        session.add(row)
    seen = []
    for number, newest in enumerate(["old", "new"]):
        with api.database.write() as session:
            session.get_one(Run, model_id).sampler_snapshot_id = newest
        (claimed,) = desk.claim([api.ok("asample", sample(row.id, number))["request_id"]])
        seen.append(decode_stored(claimed.body).snapshot_id)
    assert seen == ["old", "new"]


def test_weights_that_are_sampled_from_are_kept_and_those_that_are_gone_are_told_as_such(api: Api) -> None:
    model_id = api.run()
    with api.database.write() as session:
        run = session.get_one(Run, model_id)
        weights = Snapshot(id="a" * 32, owner_id=run.owner_id, model_id=run.id, seq_id=0, kind="adapter", size_bytes=1)
        row = sampler_of(run, snapshot_id=weights.id, last_used_at=utc_now() - timedelta(hours=23))
        session.add_all([weights, row])
    api.ok("asample", sample(row.id))
    with api.database.write() as session:
        last = session.get_one(SamplingSession, row.id).last_used_at
        assert last is not None and utc_now() - last < timedelta(minutes=1)
        session.delete(session.get_one(Snapshot, weights.id))
    api.client.app.state.services.sampling._targets = Recent(ttl_s=1)  # type: ignore[attr-defined]
    answer = api.post("asample", sample(row.id, 1))
    assert answer.status_code == 410
    assert "nobody has sampled from them for long; save weights under a name" in answer.json()["detail"]


def test_a_full_queue_asks_the_client_to_slow_down(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, max_waiting_samples=1) as api:
        identity = api.ok("create_sampling_session", sampler_body(api.session()))["sampling_session_id"]
        first = api.ok("asample", sample(identity))
        answer = api.post("asample", sample(identity, 1))
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        assert api.ok("asample", sample(identity)) == first


@pytest.mark.parametrize("used_before", [False, True])
def test_a_sampler_of_a_finished_session_takes_no_more(api: Api, used_before: bool) -> None:
    session_id = api.session()
    identity = api.ok("create_sampling_session", sampler_body(session_id))["sampling_session_id"]
    if used_before:
        api.ok("asample", sample(identity))
    api.ok(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    assert api.post("asample", sample(identity, 1)).status_code == 410
