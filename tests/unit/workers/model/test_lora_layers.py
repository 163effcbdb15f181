"""Adapters, their initial weights, and how rows find them."""

import math
import threading

import pytest
import torch
from torch import nn

from app.wire.types import LoraConfig
from workers.model.base import BaseModel
from workers.model.lora import Adapter, LoraLinear, Routing, routed

SHAPES = {"layer.q_proj": (24, 16), "lm_head": (40, 16)}


def adapter(seed: int, rank: int = 4, shapes: dict[str, tuple[int, int]] = SHAPES) -> Adapter:
    made = Adapter(LoraConfig(rank=rank, seed=seed), shapes)
    return made


def test_initial_weights_depend_on_seed_and_module_name_only() -> None:
    first, again, other = adapter(1), adapter(1, shapes=dict(reversed(SHAPES.items()))), adapter(2)
    for path in SHAPES:
        a, b = first.modules[path]
        assert torch.equal(a, again.modules[path][0])
        assert not torch.equal(a, other.modules[path][0])
        assert not b.any()
    assert not torch.equal(first.modules["layer.q_proj"][0], first.modules["lm_head"][0])


def test_initial_weights_are_the_same_on_every_machine() -> None:
    a, _ = adapter(2**63 - 1).modules["lm_head"]
    assert a.flatten()[:4].tolist() == pytest.approx([-0.133139, 0.047575, 0.083002, -0.169371], abs=1e-6)


def test_initial_a_is_distributed_as_pefts() -> None:
    a = adapter(3, rank=64, shapes={"x": (8, 400)}).modules["x"][0].detach()
    theirs = nn.init.kaiming_uniform_(torch.empty(64, 400), a=math.sqrt(5))
    assert float(a.abs().max()) <= 1 / 20
    assert float(a.std()) == pytest.approx(float(theirs.std()), rel=0.02)


def test_parameters_and_gradients_are_views_of_one_buffer() -> None:
    one = adapter(1)
    one.flat.fill_(2.0)
    one.grad_flat.fill_(3.0)
    for a, b in one.modules.values():
        assert (a == 2).all() and (b == 2).all()
        assert a.grad is not None and (a.grad == 3).all() and b.grad is not None and (b.grad == 3).all()
    assert sum(a.numel() + b.numel() for a, b in one.modules.values()) == one.num_parameters
    one.zero_grad()
    assert all(not a.grad.any() for a, _ in one.modules.values() if a.grad is not None)


def test_state_round_trips_and_misfits_are_named() -> None:
    source, target = adapter(1), adapter(2)
    source.flat.normal_()
    target.load_state(source.state())
    assert torch.equal(source.flat, target.flat)
    state = source.state()
    for broken, message in [
        ({k: v for k, v in state.items() if k != "lm_head.lora_A"}, "lack 'lm_head.lora_A'"),
        ({**state, "more.lora_A": torch.zeros(1)}, "hold 'more.lora_A'"),
        ({**state, "lm_head.lora_B": torch.zeros(3, 4)}, r"lm_head.lora_B has shape \(3, 4\), expected \(40, 4\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            target.load_state(broken)
    assert torch.equal(source.flat, target.flat)


def test_rows_of_the_base_and_of_absent_targets_are_untouched() -> None:
    layer = LoraLinear(nn.Linear(16, 24, bias=True).requires_grad_(False), "layer.q_proj")
    one, two = adapter(1), adapter(2, rank=2, shapes={"lm_head": (40, 16)})
    one.flat.normal_()
    x = torch.randn(10, 16)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    routing = Routing.of([(None, 2), (one, 3), (two, 4), (None, 1)])
    expected = plain.clone()
    a, b = one.modules["layer.q_proj"]
    expected[2:5] += one.scale * x[2:5] @ a.t() @ b.t()
    with routed(routing):
        for y in (layer(x), layer(x.view(2, 5, 16)).view(10, 24)):
            torch.testing.assert_close(y, expected)
            assert torch.equal(y[:2], plain[:2]) and torch.equal(y[5:], plain[5:])
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected)
    assert torch.equal(layer(x), plain)


def test_a_call_of_another_size_than_its_routing_is_refused() -> None:
    layer = LoraLinear(nn.Linear(16, 24), "layer.q_proj")
    with routed(Routing.of([(adapter(1), 3)])), pytest.raises(ValueError, match="4 rows, the routing is for 3"):
        layer(torch.zeros(4, 16))


def test_neighbouring_sequences_of_one_adapter_are_one_segment() -> None:
    one, two = adapter(1), adapter(2)
    routing = Routing.of([(one, 1), (one, 2), (None, 1), (two, 2), (two, 0)], row_tokens=5)
    assert [(s.adapter, s.start, s.stop) for s in routing.segments] == [(one, 0, 15), (two, 20, 30)]
    assert routing.rows == 30


def test_each_thread_has_its_own_routing(qwen: BaseModel) -> None:
    one, two = (qwen.new_adapter(LoraConfig(rank=2, seed=seed)) for seed in (1, 2))
    one.flat.normal_(std=0.1)
    two.flat.normal_(std=0.1)
    tokens = torch.arange(20).view(2, 10)

    def logits(adapter: Adapter) -> torch.Tensor:
        with torch.no_grad(), routed(Routing.of([(adapter, 2)], row_tokens=10)):
            result: torch.Tensor = qwen.lm_head(qwen.hidden(tokens))
        return result

    expected = {id(a): logits(a) for a in (one, two)}
    wrong: list[int] = []

    def work(adapter: Adapter) -> None:
        wrong.extend(i for i in range(20) if not torch.equal(logits(adapter), expected[id(adapter)]))

    threads = [threading.Thread(target=work, args=(adapter,)) for adapter in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
