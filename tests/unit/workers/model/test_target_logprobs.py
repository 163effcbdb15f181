"""The chunked unembedding against plain logits and log-softmax."""

import pytest
import torch
from torch import Tensor, nn

from app.wire.types import LoraConfig
from workers.model import logprobs
from workers.model.logprobs import Chunking, target_logprobs
from workers.model.lora import Adapter, LoraLinear, Routing

T, D, V = 23, 16, 61
CHUNKINGS = [Chunking(), Chunking(keep_elements=0), Chunking(chunk_elements=5 * V), Chunking(5 * V, 0), Chunking(1, 0)]


def setting(bias: bool = False) -> tuple[LoraLinear, list[Adapter], Routing, Tensor]:
    torch.manual_seed(0)
    head = LoraLinear(nn.Linear(D, V, bias=bias).requires_grad_(False), "lm_head")
    adapters = [Adapter(LoraConfig(rank=rank, seed=rank), {"lm_head": (V, D)}) for rank in (3, 5)]
    for adapter in adapters:
        adapter.flat.normal_(std=0.3)
    routing = Routing.of([(adapters[0], 9), (None, 6), (adapters[1], 8)])
    return head, adapters, routing, torch.randn(T, D)


def plain(head: LoraLinear, routing: Routing, hidden: Tensor, targets: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities, d hidden and the adapters' gradients by plain autograd."""
    hidden = hidden.clone().requires_grad_()
    logits = nn.functional.linear(hidden, head.weight, head.bias)
    factors = []
    for adapter, start, stop in routing.segments:
        a, b = (p.detach().clone().requires_grad_() for p in adapter.modules["lm_head"])
        factors += [a, b]
        logits = logits.index_add(0, torch.arange(start, stop), adapter.scale * hidden[start:stop] @ a.t() @ b.t())
    lp = torch.log_softmax(logits, -1).gather(1, targets.view(T, -1)).view(targets.shape)
    return (lp.detach(), *torch.autograd.grad(lp, [hidden, *factors], grad))


@pytest.mark.parametrize("chunking", CHUNKINGS, ids=str)
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_equals_plain_autograd(chunking: Chunking, k: int | None, sparse: bool) -> None:
    head, adapters, routing, hidden = setting(bias=True)
    shape = (T,) if k is None else (T, k)
    targets, grad = torch.randint(0, V, shape), torch.randn(shape)
    if sparse:
        grad[torch.rand(T) < 0.6] = 0
        grad[:9] = 0
    expected = plain(head, routing, hidden, targets, grad)
    mine = hidden.clone().requires_grad_()
    lp = target_logprobs(mine, head, routing, targets, chunking)
    assert lp.dtype == torch.float32
    lp.backward(grad)
    assert mine.grad is not None
    grads = [p.grad for adapter in adapters for p in adapter.modules["lm_head"]]
    for found, reference in zip([lp.detach(), mine.grad, *grads], expected, strict=True):
        torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)


def test_chunks_do_not_change_the_result() -> None:
    head, _, routing, hidden = setting()
    targets = torch.randint(0, V, (T,))
    with torch.no_grad():
        results = [target_logprobs(hidden, head, routing, targets, chunking) for chunking in CHUNKINGS]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=0)


def test_tokens_without_gradient_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    head, _, routing, hidden = setting()
    lp = target_logprobs(hidden.requires_grad_(), head, routing, torch.randint(0, V, (T,)), Chunking(4 * V, 0))
    rows = []
    compute = logprobs._logits

    def counted(hidden_cD: Tensor, *arguments: object, **options: object) -> object:
        rows.append(len(hidden_cD))
        return compute(hidden_cD, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs, "_logits", counted)
    grad = torch.zeros(T)
    grad[[2, 11, 20]] = 1.0
    lp.backward(grad, retain_graph=True)
    assert sum(rows) == 3
    lp.backward(torch.zeros(T))
    assert sum(rows) == 3


def test_logits_of_one_chunk_at_most_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    head, _, routing, hidden = setting()
    largest = 0
    compute = logprobs._logits

    def measured(*arguments: object, out: Tensor) -> object:
        nonlocal largest
        largest = max(largest, out.untyped_storage().nbytes())
        return compute(*arguments, out=out)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs, "_logits", measured)
    target_logprobs(
        hidden.requires_grad_(), head, routing, torch.randint(0, V, (T,)), Chunking(4 * V, 0)
    ).sum().backward()
    assert largest == 4 * V * 4


def test_extreme_logits_stay_finite() -> None:
    head, _, routing, hidden = setting()
    targets = torch.randint(0, V, (T,))
    with torch.no_grad():
        lp = target_logprobs(hidden * 1e4, head, routing, targets)
    assert torch.isfinite(lp).all()
