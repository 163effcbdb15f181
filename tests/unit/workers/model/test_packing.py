"""Which sequences share a micro-batch."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.wire.types import Datum, LoraConfig
from workers.model.batch import MAX_PADDING, SPLIT_COST_TOKENS, SPLIT_PADDING, Row, assemble, pack, padding
from workers.model.lora import Adapter

SEQUENCES = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4)), min_size=1, max_size=60)


@given(SEQUENCES, st.integers(1, 2000))
def test_every_sequence_once_within_the_budget_and_in_order(sequences: list[tuple[int, int]], budget: int) -> None:
    lengths, owners = [n for n, _ in sequences], [o for _, o in sequences]
    batches = pack(lengths, owners, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sequences)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
        assert batch == sorted(batch, key=lambda i: (owners[i], i))


@given(SEQUENCES, st.integers(1, 2000))
def test_packed_rows_are_filled_up_in_order(sequences: list[tuple[int, int]], budget: int) -> None:
    lengths, owners = [n for n, _ in sequences], [o for _, o in sequences]
    batches = pack(lengths, owners, budget, padded=False)
    order = [i for batch in batches for i in batch]
    assert order == sorted(range(len(lengths)), key=lambda i: (owners[i], i))
    for batch, following in zip(batches, [*batches[1:], []], strict=True):
        tokens = sum(lengths[i] for i in batch)
        assert len(batch) == 1 or tokens <= budget
        assert not following or tokens + lengths[following[0]] > budget


def ragged(kind: str, sequences: int, seed: int) -> list[int]:
    """Lengths as data has them: short and even, long and even, with a long tail, or of two kinds."""
    draw = np.random.default_rng(seed)
    if kind == "long tail":
        return np.clip(draw.lognormal(5.5, 0.8, sequences), 8, 4096).astype(int).tolist()
    if kind == "prompts and answers":
        long = draw.random(sequences) < 0.2
        return np.where(long, draw.integers(800, 2000, sequences), draw.integers(20, 60, sequences)).tolist()
    return draw.integers(16, {"short": 257, "long": 2049}[kind], sequences).tolist()


RAGGED = st.builds(
    ragged,
    st.sampled_from(["short", "long", "long tail", "prompts and answers"]),
    st.integers(1, 256),
    st.integers(0, 2**31),
)


@given(RAGGED, st.integers(1, 8), st.sampled_from([1024, 4096, 8192]))
def test_no_micro_batch_has_more_padding_than_is_worth_a_split(lengths: list[int], runs: int, budget: int) -> None:
    owners = [i % runs for i in range(len(lengths))]
    batches = pack(lengths, owners, budget)
    for batch in batches:
        rows = len(batch) * max(lengths[i] for i in batch)
        assert rows - sum(lengths[i] for i in batch) <= max(SPLIT_PADDING * rows, SPLIT_COST_TOKENS)
    if sum(lengths) >= 8192:
        assert padding(batches, lengths) <= MAX_PADDING


def test_ragged_data_have_little_padding() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        lengths, owners = draw.integers(16, 513, 128).tolist(), draw.integers(0, 8, 128).tolist()
        assert padding(pack(lengths, owners, 8192), lengths) < MAX_PADDING


def test_equal_lengths_of_one_owner_stay_together() -> None:
    batches = pack([64] * 32, [i % 4 for i in range(32)], 512)
    assert len(batches) == 4
    assert all(len({i % 4 for i in batch}) == 1 for batch in batches)


def test_short_sequences_are_not_split_for_a_few_tokens() -> None:
    assert len(pack([3, 9, 1, 12, 5], [0] * 5, 4096)) == 1


def row(work: int, adapter: Adapter, n: int, k: int | None = None) -> Row:
    targets = np.full((n,) if k is None else (n, k), 10 * work + n)
    return Row(work, 0, adapter, Datum(np.full(n, n, np.int32), {"target_tokens": targets}))


def test_a_micro_batch_is_laid_out_row_by_row() -> None:
    one, two = (Adapter(LoraConfig(rank=1, seed=i), {"x": (2, 2)}) for i in range(2))
    batch = assemble([row(0, one, 2), row(0, one, 3), row(1, one, 1, k=2), row(2, two, 3)], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[2, 2, 0], [3, 3, 3], [1, 0, 0], [3, 3, 3]]
    assert batch.real is not None and batch.real.tolist() == [0, 1, 3, 4, 5, 6, 9, 10, 11]
    assert batch.targets.tolist() == [[2, 0]] * 2 + [[3, 0]] * 3 + [[11, 11]] + [[23, 0]] * 3
    assert [(s.start, s.stop) for s in batch.row_routing.segments] == [(0, 9), (9, 12)]
    assert [(s.start, s.stop) for s in batch.token_routing.segments] == [(0, 6), (6, 9)]
    assert [(p.work, p.start, p.stop, p.k) for p in batch.parts] == [(0, 0, 5, None), (1, 5, 6, 2), (2, 6, 9, None)]


def test_a_packed_micro_batch_is_one_row() -> None:
    one, two = (Adapter(LoraConfig(rank=1, seed=i), {"x": (2, 2)}) for i in range(2))
    batch = assemble([row(0, one, 2), row(1, one, 1, k=2), row(2, two, 3)], torch.device("cpu"), padded=False)
    assert batch.input_ids.tolist() == [[2, 2, 1, 3, 3, 3]] and batch.real is None
    assert batch.packing is not None and batch.packing.positions.tolist() == [[0, 1, 0, 0, 1, 2]]
    assert batch.packing.sequences.tolist() == [[0, 0, 1, 2, 2, 2]]
    assert batch.packing.bounds.tolist() == [0, 2, 3, 6] and batch.packing.bounds.dtype == torch.int32
    assert batch.packing.longest == 3
    assert [(s.start, s.stop) for s in batch.row_routing.segments] == [(0, 3), (3, 6)]
    assert [(p.work, p.start, p.stop, p.k) for p in batch.parts] == [(0, 0, 2, None), (1, 2, 3, 2), (2, 3, 6, None)]


def test_equal_lengths_need_no_selection_of_real_tokens() -> None:
    one = Adapter(LoraConfig(rank=1, seed=0), {"x": (2, 2)})
    assert assemble([row(0, one, 4), row(0, one, 4)], torch.device("cpu")).real is None
