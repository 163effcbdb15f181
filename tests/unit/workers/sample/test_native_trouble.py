"""Cancelled and failing jobs leave at once, and the others do not notice."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog
import torch

from app.wire.types import LoraConfig, SampleRequest, SampleResult
from tests.unit.workers.sample.native_lab import Inbox, Lab, ask, drain, prompt, qwen, tokens_of
from workers.model.lora import Adapter, Routing, routed
from workers.sample.engines.base import Cancelled, EngineFailure, Job
from workers.sample.engines.forward import Forward


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def assert_greedy(lab: Lab, outcome: SampleResult | Exception, request: SampleRequest) -> None:
    assert isinstance(outcome, SampleResult)
    expected = lab.greedy(request.prompt, request.params.max_tokens or 0)
    assert tokens_of(outcome) == [expected] * request.num_samples


def others(count: int, max_tokens: int = 12) -> list[SampleRequest]:
    return [ask(f"o{i}", prompt(4 + i), max_tokens=max_tokens, temperature=0.0) for i in range(count)]


def test_cancel_while_running(lab: Lab) -> None:
    engine, inbox = lab.engine(), Inbox()
    for request in others(3):
        engine.submit(inbox.job(request))
    engine.submit(inbox.job(ask("x", prompt(9), max_tokens=100, num_samples=5)))
    for _ in range(4):
        engine.step()
    assert engine.running == 8
    engine.cancel("x")
    engine.step()
    assert engine.running == 3
    assert isinstance(inbox["x"], Cancelled)
    drain(engine)
    for request in others(3):
        assert_greedy(lab, inbox[request.request_id], request)


def test_cancel_before_it_runs_half_way_through_its_prompt_and_after(lab: Lab) -> None:
    engine, inbox = lab.engine(max_rows=1, prefill_tokens=16), Inbox()
    engine.submit(inbox.job(ask("prompt", prompt(100), max_tokens=5)))
    engine.submit(inbox.job(ask("waiting", prompt(5), max_tokens=5)))
    engine.step()
    engine.step()
    engine.cancel("prompt")
    engine.cancel("waiting")
    engine.cancel("unknown")
    engine.step()
    assert isinstance(inbox["prompt"], Cancelled)
    assert isinstance(inbox["waiting"], Cancelled)
    [request] = others(1)
    engine.submit(inbox.job(request))
    drain(engine)
    engine.cancel("o0")
    drain(engine)
    assert_greedy(lab, inbox["o0"], request)
    assert (engine.running, engine.waiting) == (0, 0)


def test_cancel_of_a_job_that_entered_in_parts(lab: Lab) -> None:
    engine, inbox = lab.engine(max_rows=2), Inbox()
    engine.submit(inbox.job(ask("x", prompt(5), max_tokens=50, num_samples=7)))
    engine.step()
    assert engine.waiting == 1
    engine.cancel("x")
    engine.step()
    assert (engine.running, engine.waiting) == (0, 0)
    assert isinstance(inbox["x"], Cancelled)


def foreign_adapter() -> Adapter:
    """An adapter with the right names and the wrong shapes: every call with it raises."""
    adapter = Adapter(LoraConfig(rank=2, seed=0), {"model.layers.1.mlp.up_proj": (48, 31)})
    return adapter


def nan_adapter(lab: Lab) -> Adapter:
    adapter = lab.adapter(2, 9)
    adapter.flat.fill_(float("nan"))
    return adapter


@pytest.mark.parametrize("kind", ["raises", "nan"])
@pytest.mark.parametrize("max_tokens", [1, 12])
def test_an_adapter_that_cannot_be_served(lab: Lab, kind: str, max_tokens: int) -> None:
    adapter = foreign_adapter() if kind == "raises" else nan_adapter(lab)
    engine, inbox = lab.engine(), Inbox()
    requests = others(4, max_tokens)
    for i, request in enumerate(requests):
        engine.submit(inbox.job(request))
        engine.submit(inbox.job(ask(f"x{i}", prompt(5 + i), max_tokens=max_tokens, num_samples=2), adapter))
    drain(engine)
    for i, request in enumerate(requests):
        assert isinstance(inbox[f"x{i}"], EngineFailure)
        assert_greedy(lab, inbox[request.request_id], request)


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_an_adapter_that_breaks_while_it_runs(lab: Lab, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inbox = lab.engine(), Inbox()
    adapter = lab.adapter(2, 5)
    requests = others(4)
    for i, request in enumerate(requests):
        engine.submit(inbox.job(request))
        engine.submit(inbox.job(ask(f"x{i}", prompt(5 + i), max_tokens=12, num_samples=3), adapter))
    for _ in range(4):
        engine.step()
    if kind == "raises":

        def broken(self: Forward, *args: Any) -> torch.Tensor:
            if any(segment.adapter is adapter for segment in args[-1].segments):
                raise RuntimeError("no kernel for this")
            return whole(self, *args)

        whole = Forward.decode
        monkeypatch.setattr(Forward, "decode", broken)
        engine.submit(inbox.job(ask("new", prompt(3), max_tokens=12), adapter))
    else:
        adapter.flat.fill_(float("nan"))
    drain(engine)
    for i, request in enumerate(requests):
        outcome = inbox[f"x{i}"]
        assert isinstance(outcome, EngineFailure)
        assert isinstance(outcome.__cause__, RuntimeError) == (kind == "raises")
        assert_greedy(lab, inbox[request.request_id], request)
    again = [ask(f"again{i}", prompt(40 + i), max_tokens=12, temperature=0.0) for i in range(8)]
    for request in again:
        engine.submit(inbox.job(request))
    drain(engine)
    for request in again:
        assert_greedy(lab, inbox[request.request_id], request)


def test_a_receiver_that_raises_stops_nobody(lab: Lab, logs: list[MutableMapping[str, Any]]) -> None:
    def refuse(outcome: SampleResult | Exception) -> None:
        raise RuntimeError("nobody home")

    engine, inbox = lab.engine(), Inbox()
    [request] = others(1)
    engine.submit(Job(ask("x", prompt(3), max_tokens=2), None, refuse))
    engine.submit(inbox.job(request))
    drain(engine)
    assert_greedy(lab, inbox["o0"], request)
    assert [(entry["event"], entry["request_id"]) for entry in logs] == [("deliver_failed", "x")]


def test_a_tokenizer_that_raises_fails_its_job_only(lab: Lab) -> None:
    def broken(tokens: object) -> str:
        raise ValueError("no such token")

    engine, inbox = lab.engine(decode=broken), Inbox()
    [request] = others(1)
    engine.submit(inbox.job(ask("x", request.prompt, max_tokens=9, stop_strings=("x",))))
    engine.submit(inbox.job(request))
    drain(engine)
    assert isinstance(inbox["x"], EngineFailure)
    assert_greedy(lab, inbox["o0"], request)


def test_nothing_to_do(lab: Lab) -> None:
    engine = lab.engine()
    assert engine.step() is False
    assert (engine.running, engine.waiting) == (0, 0)


def test_training_sees_ordinary_weights_after_sampling() -> None:
    lab = Lab.of(qwen)
    adapter = lab.adapter(2, 1)
    engine, inbox = lab.engine(), Inbox()
    engine.submit(inbox.job(ask("r", prompt(5), max_tokens=4), adapter))
    drain(engine)
    with routed(Routing.of([(adapter, 6)])):
        hidden = lab.base.hidden(torch.tensor([prompt(6)]))
        lab.base.lm_head(hidden).float().logsumexp(-1).sum().backward()
    assert adapter.grad_flat.abs().sum() > 0
