"""The log's promises, seen from outside: order by sequence id, each operation once, nothing stuck."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.service import Service
from tests.e2e.wire_client import WireClient

ROWS = [[[5, 9, 200, 31, 7]], [[12, 1000, 44, 8]], [[77, 3, 15, 16, 17, 18]]]


@pytest.fixture
def wire(service: Service) -> WireClient:
    return WireClient(service.base_url)


def _in_order(wire: WireClient) -> tuple[str, np.ndarray]:
    """A run that took ROWS as operations 1 to 3, then a step: its id, and its logprobs after that."""
    run = wire.create_run()
    for seq_id, rows in enumerate(ROWS, start=1):
        wire.forward_backward(run, seq_id, rows)
    wire.optim_step(run, 4)
    return run, wire.logprobs(run, 5, [row for rows in ROWS for row in rows])


def test_chunks_that_arrive_2_3_1_count_in_order(wire: WireClient) -> None:
    run = wire.create_run()
    futures = {seq: wire.forward_backward(run, seq, ROWS[seq - 1]).json()["request_id"] for seq in (2, 3)}
    wire.optim_step(run, 4)
    futures[1] = wire.forward_backward(run, 1, ROWS[0]).json()["request_id"]
    for request_id in futures.values():
        assert wire.wait(request_id).headers["content-type"] == "application/x-protobuf"
    got = wire.logprobs(run, 5, [row for rows in ROWS for row in rows])
    np.testing.assert_allclose(got, _in_order(wire)[1], atol=1e-5)


def test_later_operations_wait_for_the_gap(wire: WireClient) -> None:
    run = wire.create_run()
    future = wire.forward_backward(run, 2, ROWS[1]).json()
    answer = wire.http.post("retrieve_future", json={"request_id": future["request_id"]}, timeout=40)
    assert answer.status_code == 408
    assert "seq_id 1" in answer.json()["queue_state_reason"]
    wire.forward_backward(run, 1, ROWS[0])
    assert wire.wait(future["request_id"]).status_code == 200


def test_a_retried_post_trains_once(wire: WireClient) -> None:
    """Every request is sent three times; weights equal those of a run that sent each once."""
    run = wire.create_run()
    for seq_id, rows in enumerate(ROWS, start=1):
        answers = [wire.forward_backward(run, seq_id, rows) for _ in range(3)]
        assert len({answer.json()["request_id"] for answer in answers}) == 1
    for _ in range(3):
        wire.optim_step(run, 4)
    got = wire.logprobs(run, 5, [row for rows in ROWS for row in rows])
    np.testing.assert_allclose(got, _in_order(wire)[1], atol=1e-5)


def test_another_request_under_a_used_sequence_id_is_a_conflict(wire: WireClient) -> None:
    run = wire.create_run()
    wire.forward_backward(run, 1, ROWS[0])
    answer = wire.forward_backward(run, 1, ROWS[1])
    assert answer.status_code == 409 and "seq_id" in answer.json()["detail"]


def test_a_bad_operation_takes_its_place_and_the_run_goes_on(wire: WireClient) -> None:
    run, reference = wire.create_run(), wire.create_run()
    bad = wire.forward_backward(run, 1, [[5, 999_999, 7]])
    assert bad.status_code == 200
    error = wire.wait(bad.json()["request_id"]).json()
    assert error["category"] == "user" and "data[0]" in error["error"] and "999999" in error["error"]
    wire.forward_backward(run, 2, ROWS[0])
    metrics = wire.wait(wire.optim_step(run, 3).json()["request_id"]).json()["metrics"]
    assert metrics["failed_operations"] == 1.0
    wire.forward_backward(reference, 1, ROWS[0])
    wire.optim_step(reference, 2)
    np.testing.assert_allclose(wire.logprobs(run, 4, ROWS[0]), wire.logprobs(reference, 3, ROWS[0]), atol=1e-5)


def test_a_step_whose_operations_all_failed_fails(wire: WireClient) -> None:
    run = wire.create_run()
    wire.forward_backward(run, 1, [[5, 999_999, 7]])
    error = wire.wait(wire.optim_step(run, 2).json()["request_id"]).json()
    assert error["category"] == "user" and "seq_id 1" in error["error"]
    assert "metrics" in wire.wait(wire.optim_step(run, 3).json()["request_id"]).json()


def test_results_can_be_fetched_again(wire: WireClient) -> None:
    run = wire.create_run()
    request_id = wire.forward_backward(run, 1, ROWS[0]).json()["request_id"]
    assert wire.wait(request_id).content == wire.wait(request_id).content


def test_zstd_bodies_are_the_same_requests(wire: WireClient) -> None:
    import zstandard

    from app.wire import tinker_pb2 as pb

    run = wire.create_run()
    plain = wire.forward_backward(run, 1, ROWS[0])
    message = pb.ForwardBackwardRequest.FromString(plain.request.content)
    body = zstandard.ZstdCompressor(write_content_size=False).compress(message.SerializeToString())
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    answer = wire.http.post("forward_backward", content=body, headers=headers)
    assert answer.status_code == 200 and answer.json() == plain.json()
