"""Terms by grouped products are the terms by slices, where the kernel can take them and where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.wire.types import ForwardBackwardOutput, LoraConfig
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import plain
from workers.model import grouped, slices
from workers.model.base import BaseModel
from workers.model.dispatch import Dispatch
from workers.model.forward import Work, run_pass
from workers.model.lora import Adapter, Term

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = pytest.param("cuda", torch.bfloat16, 2e-2, marks=[pytest.mark.gpu, NO_CUDA])
PLACES = [("cpu", torch.float32, 1e-5), ("cpu", torch.bfloat16, 2e-2), CUDA]

IN, OUT, EXPERTS = 32, 48, 5


def adapters(ranks: list[int], device: str, experts: tuple[int, ...] = ()) -> list[Adapter]:
    made = []
    for seed, rank in enumerate(ranks):
        alpha = 16.0 + seed
        adapter = Adapter(LoraConfig(rank=rank, seed=seed, alpha=alpha), {"layer": (*experts, OUT, IN)}, device)
        adapter.flat.copy_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(seed)))
        adapter.flat.div_(rank)
        made.append(adapter)
    return made


def terms_of(made: list[Adapter], bounds: list[tuple[int, int]]) -> list[Term]:
    return [Term(a, b, x.factors["layer"], x.scale) for x, (a, b) in zip(made, bounds, strict=True)]


def close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    size = max(1.0, float(theirs.abs().max()))
    assert float((mine.float() - theirs.float()).abs().max()) <= tolerance * size


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize(
    ("ranks", "bounds"),
    [
        ([8, 8, 8], [(0, 7), (7, 8), (8, 40)]),
        ([16, 16, 16], [(3, 7), (9, 20), (20, 33)]),
        ([8, 32, 8, 1, 32, 3, 3], [(0, 5), (5, 9), (12, 13), (13, 20), (20, 30), (30, 31), (35, 40)]),
    ],
    ids=["side by side", "with gaps", "mixed ranks"],
)
def test_dense_layers(
    device: str, dtype: torch.dtype, tolerance: float, ranks: list[int], bounds: list[tuple[int, int]]
) -> None:
    draw = torch.Generator().manual_seed(0)
    x_TI, y_TO, g_TO, dx_TI = (torch.randn(40, n, generator=draw).to(device, dtype) for n in (IN, OUT, OUT, IN))
    results = []
    for way in (slices, grouped):
        made = adapters(ranks, device)
        terms = terms_of(made, bounds)
        y, dx = y_TO.clone(), dx_TI.clone()
        low = way.add_terms(y, x_TI, terms)
        for again, first in zip(way.projections(x_TI, terms), low, strict=True):
            assert torch.equal(again, first)
        way.add_term_grads(g_TO, x_TI, low, terms, dx)
        results.append((y, dx, made))
    (y, dx, made), (grouped_y, grouped_dx, grouped_made) = results
    close(grouped_y, y, tolerance)
    close(grouped_dx, dx, tolerance)
    for one, other in zip(made, grouped_made, strict=True):
        close(other.grad_flat, one.grad_flat, tolerance)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), PLACES)
@pytest.mark.parametrize("ranks", [[8], [8, 32, 8], [8, 3]], ids=str)
def test_experts(
    device: str, dtype: torch.dtype, tolerance: float, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, choices = 30, 2
    index = torch.randint(0, EXPERTS - 1, (rows, choices), generator=draw).to(device)
    x_TI, weight_EIO = (torch.randn(*n, generator=draw).to(device, dtype) for n in ((rows, IN), (EXPERTS, IN, OUT)))
    g_SO, dx_SI = (torch.randn(rows * choices, n, generator=draw).to(device, dtype) for n in (OUT, IN))
    bounds = [(9 * i, 9 * i + 9) for i in range(len(ranks))]
    results = []
    for way in (False, True):
        monkeypatch.setattr(grouped, "suits", lambda like, way=way: way)
        dispatch = Dispatch(index, EXPERTS, like=x_TI)
        made = adapters(ranks, device, (EXPERTS,))
        terms = terms_of(made, bounds)
        x_SI = x_TI[dispatch.rows]
        y, dx = dispatch.product(x_SI, weight_EIO), dx_SI.clone()
        low = dispatch.add_terms(y, x_SI, terms)
        dispatch.add_term_grads(g_SO, x_SI, low, terms, dx)
        results.append((y, dx, made))
    (y, dx, made), (grouped_y, grouped_dx, grouped_made) = results
    close(grouped_y, y, tolerance)
    close(grouped_dx, dx, tolerance)
    for one, other in zip(made, grouped_made, strict=True):
        close(other.grad_flat, one.grad_flat, tolerance)
        for grad in (other.factors["layer"].grad_a, other.factors["layer"].grad_b_t):
            assert grad[0].any() and not grad[EXPERTS - 1].any()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize(("device", "dtype", "tolerance"), [PLACES[0], CUDA])
def test_whole_passes(
    name: str, device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseModel(plain(name).to(device, dtype), name)  # type: ignore[arg-type]
    results = []
    for way in (False, True):
        monkeypatch.setattr(grouped, "suits", lambda like, way=way: way)
        works = []
        for seed, rank in enumerate([8, 8, 16, 3]):
            adapter = reference.random_adapter(base, seed, rank)
            works.append(Work(adapter, reference.random_data(seed, [9, 4]), "cross_entropy"))
        outputs = run_pass(base, works, micro_batch_tokens=256)
        results.append((works, outputs))
    for work, output, other, same in zip(*results[0], *results[1], strict=True):
        assert isinstance(output, ForwardBackwardOutput) and isinstance(same, ForwardBackwardOutput)
        for a, b in zip(output.loss_fn_outputs, same.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=10 * tolerance, rtol=tolerance)
        close(other.adapter.grad_flat, work.adapter.grad_flat, tolerance)


@pytest.mark.gpu
@NO_CUDA
def test_a_gpu_of_today_takes_grouped_products_for_16_bit_numbers() -> None:
    for dtype, expected in [(torch.bfloat16, True), (torch.float32, False)]:
        assert grouped.suits(torch.empty(1, device="cuda", dtype=dtype)) is expected
