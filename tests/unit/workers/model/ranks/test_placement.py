"""Which rank a process is, from torch's rendezvous variables."""

import pytest

from workers.model.ranks.placement import BadPlacement, Placement, placement

HOST = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"}


def test_without_settings_all_ranks_are_here() -> None:
    place = placement({}, 4)
    assert place == Placement(0, 4, 0, 4) and place.one_host


def test_a_second_host_begins_where_the_first_ends() -> None:
    place = placement(HOST, 4)
    assert place == Placement(4, 8, 0, 4, "a", 29500) and not place.one_host
    assert [place.neighbour(n).rank for n in range(4)] == [4, 5, 6, 7]


def test_a_started_rank_finds_what_it_was_told() -> None:
    started = placement(HOST, 4).neighbour(3)
    assert placement(started.environment(), 1) == started


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "5"}, "RANK 5 and the 4 ranks of this host do not fit into WORLD_SIZE 8"),
        ({"RANK": "-1"}, "do not fit"),
        ({"WORLD_SIZE": "all"}, "WORLD_SIZE must be a number, got 'all'"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is not"),
    ],
)
def test_settings_that_do_not_go_together_are_named(changed: dict[str, str | None], words: str) -> None:
    settings = {name: value for name, value in (HOST | changed).items() if value is not None}  # type: ignore[operator]
    with pytest.raises(BadPlacement, match=words):
        placement(settings, 4)
