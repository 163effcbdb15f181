"""JSON sent anything: batches in the form of older SDKs, and samples. Every body gets a future or a named refusal, and
what is accepted comes to an end on a real worker.

Bodies are good ones in which values were replaced, taken away or added, and good ones whose bytes were damaged.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.conftest import Api, running
from tests.integration.fuzz_answers import check_answer
from tests.integration.quick_sampler import quick_sampler
from tests.integration.test_protobuf_fuzz import MAX_BODY_BYTES, Bench
from tests.services import wait_for

CASES, MANY_CASES = 1000, 20_000
LONGEST_CPU_S = 2.0

BATCH = {
    "data": [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                "weights": {"data": [1.0, 0.5, 0.0], "dtype": "float32", "shape": [3]},
            },
        },
        {
            "model_input": {"chunks": [{"tokens": [5, 6]}, {"tokens": [7]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3, 1]},
                "weights": {
                    "data": [1.0, 2.0],
                    "dtype": "float32",
                    "shape": [3, 1],
                    "sparse_crow_indices": [0, 1, 1, 2],
                    "sparse_col_indices": [0, 0],
                },
            },
        },
    ],
    "loss_fn": "cross_entropy",
    "loss_fn_config": {},
}
SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
    "sampling_params": {
        "max_tokens": 3,
        "seed": 7,
        "stop": [5],
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
    },
    "num_samples": 2,
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 2,
    "topk_sample_logprobs": 2,
    "prompt_logprobs_last_n": 2,
    "target_prompt_logprobs": {
        "data": [1, 2, 3],
        "dtype": "int64",
        "shape": [3, 2],
        "sparse_crow_indices": [0, 1, 2, 3],
        "sparse_col_indices": [0, 1, 0],
    },
    "prompt_alt_tokens_k": 2,
    "record_stability_info": True,
    "type": "sample",
}
ODD_NUMBERS = [0, -1, 1, 2, 3, 63, 97, 2**31, 2**63, -(2**63), 10**40, 0.5, 1e-320, 1e308, float("nan"), float("inf")]
ODD_TEXTS = ["", "int64", "float32", "cross_entropy", "ppo", "image", "\0", "\ud800", "q" * 3000]
ODD_LISTS = [[], [[]], [None], [1, "a"], [1.5, 2], [2**70], [0, 2**62], [1] * 70]
ODD_OBJECTS = [{}, {"": 0}, {"type": "image", "data": ""}, {"tokens": [1]}, {"beta": 0.1}]
ODD: st.SearchStrategy[Any] = st.sampled_from([None, True, *ODD_NUMBERS, *ODD_TEXTS, *ODD_LISTS, *ODD_OBJECTS])
Place = tuple[Any, ...]


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Where a JSON value has values, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*here, key)
        yield from places(item, (*here, key))


@st.composite
def spoilt(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A copy of `good` with up to three changes."""
    body = copy.deepcopy(good)
    changes = draw(st.sampled_from([0, 1, 1, 1, 1, 2, 3]))
    for kind in draw(
        st.lists(
            st.sampled_from(["set", "drop", "add", "repeat", "nudge", "nudge"]), min_size=changes, max_size=changes
        )
    ):
        found = list(places(body))
        *way, last = found[draw(st.integers(0, len(found) - 1))]
        holder: Any = body
        for key in way:
            holder = holder[key]
        if kind == "drop" and found[1:]:
            del holder[last]
        elif kind == "repeat" and isinstance(holder, list):
            holder.extend(holder[:1] * draw(st.sampled_from([1, 3, 200])))
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["", "extra", "shape", "type", "seed", "stop", "\0"]))] = copy.deepcopy(
                draw(ODD)
            )
        elif kind == "nudge" and isinstance(holder[last], int | float):
            holder[last] += draw(st.integers(-1, 2))
        else:
            holder[last] = copy.deepcopy(draw(ODD))
    return body


@st.composite
def texts(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What becomes of a text on its way: most times nothing."""
    kind = draw(st.sampled_from(["", "", "", "", "", "", "flip", "cut", "deep", "twice"]))
    place, mask = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 255))

    def damage(text: bytes) -> bytes:
        at = int(place * len(text))
        if kind == "flip":
            return text[:at] + bytes([text[at] ^ mask]) + text[at + 1 :]
        if kind == "cut":
            return text[:at]
        if kind == "deep":
            return text[:at] + b"[" * mask * 20 + text[at:]
        return text + text[at:] if kind == "twice" else text

    return damage


ONCE = settings(
    derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None
)


def batches(bench: Bench, cases: int) -> None:
    @settings(ONCE, max_examples=cases)
    @given(batch=spoilt(BATCH), forward=st.booleans(), damage=texts())
    def send(batch: dict[str, Any], forward: bool, damage: Callable[[bytes], bytes]) -> None:
        route, field = ("forward", "forward_input") if forward else ("forward_backward", "forward_backward_input")
        body = {"model_id": bench.model_id, "seq_id": bench.seq_id, field: batch}
        began = time.process_time()
        bench.settled(bench.api.post(route, damage(json.dumps(body).encode())))
        assert time.process_time() - began < LONGEST_CPU_S

    send()
    assert bench.outcomes["done"] > cases // 20 and bench.outcomes["failed"] > cases // 20
    assert bench.outcomes["400"] > cases // 20


def samples(api: Api, cases: int) -> None:
    session = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = api.ok("create_sampling_session", session)["sampling_session_id"]
    futures: list[str] = []

    @settings(ONCE, max_examples=cases)
    @given(sample=spoilt(SAMPLE), damage=texts())
    def send(sample: dict[str, Any], damage: Callable[[bytes], bytes]) -> None:
        body = {"sampling_session_id": sampler, "seq_id": len(futures), **sample}
        answer = api.post("asample", damage(json.dumps(body).encode()))
        check_answer(answer)
        assert answer.status_code in (200, 400, 404, 409, 422), answer.text
        if answer.status_code == 200:
            futures.append(answer.json()["request_id"])

    send()
    assert len(futures) > cases // 20
    for request_id in futures:
        wait_for(lambda request_id=request_id: api.poll(request_id).status_code != 408)  # type: ignore[misc]
        answer = api.poll(request_id)
        check_answer(answer)
        assert answer.status_code == 200, answer.text
        failed = answer.headers["content-type"] == "application/json"
        assert not failed or answer.json()["category"] == "user", answer.text


@pytest.fixture
def bench(configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Bench]:
    with running(configure, sqlite_url, redis_url, tmp_path, max_request_bytes=MAX_BODY_BYTES, key_cache_s=2) as api:
        made = Bench(api, tmp_path, api.database)
        yield made
        made.lab.close()


def test_no_json_batch_is_stuck_or_answered_5xx(bench: Bench) -> None:
    batches(bench, CASES)


def test_no_sample_is_stuck_or_answered_5xx(bench: Bench) -> None:
    with quick_sampler(bench.api):
        samples(bench.api, CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_of_many_json_batches_is_stuck_or_answered_5xx(bench: Bench) -> None:
    batches(bench, MANY_CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_none_of_many_samples_is_stuck_or_answered_5xx(bench: Bench) -> None:
    with quick_sampler(bench.api):
        samples(bench.api, MANY_CASES)
