"""Every datum goes to one rank, within the budget of micro-batches, and the ranks have about as much to do."""

from hypothesis import given
from hypothesis import strategies as st

from workers.model.ranks.shares import share_out

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 9), st.integers(1, 300), st.data())
def test_each_row_is_computed_once(lengths: list[int], ranks: int, budget: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    shares = share_out(lengths, owners, budget, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(len(lengths)))
    for batch in (batch for share in shares for batch in share):
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
        assert [owners[i] for i in batch] == sorted(owners[i] for i in batch)


@given(LENGTHS, st.integers(1, 9))
def test_no_rank_has_more_than_its_part_and_the_longest_datum(lengths: list[int], ranks: int) -> None:
    shares = share_out(lengths, [0] * len(lengths), 10**6, ranks)
    loads = [sum(lengths[i] for batch in share for i in batch) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_fewer_datums_than_ranks_leave_ranks_without() -> None:
    assert share_out([7], [0], 100, 4) == [[[0]], [], [], []]
