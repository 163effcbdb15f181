"""LoRA products of rows that belong to different slots, or to none."""

from __future__ import annotations

import torch

from workers.sample.engines.vllm_cpu_lora import expand, rows_of_slots, shrink


def test_slots_that_lie_together_are_slices_and_the_base_models_rows_are_nobodys() -> None:
    found = dict(rows_of_slots(torch.tensor([2, 2, -1, 0, -1, 0, 1])))
    assert found[2] == slice(0, 2)
    assert found[1] == slice(6, 7)
    assert isinstance(found[0], torch.Tensor)
    assert found[0].tolist() == [3, 5]
    assert sorted(found) == [0, 1, 2]
    assert rows_of_slots(torch.tensor([-1, -1])) == []


def test_each_row_gets_the_product_of_its_own_slot() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 1, 4, 6, generator=generator), torch.randn(3, 1, 5, 4, generator=generator)
    x, slots = torch.randn(7, 6, generator=generator), torch.tensor([2, -1, 0, 2, 0, -1, 1])
    low, out = torch.zeros(7, 4), torch.ones(7, 9)
    for slot, rows in rows_of_slots(slots):
        shrink(low, x, a, slot, rows, 0.5)
        expand(out, low, b, slot, rows, 2, 5, True)
    for row, slot in enumerate(slots.tolist()):
        delta = 0.5 * b[slot, 0] @ a[slot, 0] @ x[row] if slot >= 0 else torch.zeros(5)
        torch.testing.assert_close(out[row, 2:7], 1 + delta)
        torch.testing.assert_close(out[row, [0, 1, 7, 8]], torch.ones(4))
