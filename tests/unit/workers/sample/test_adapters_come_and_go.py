"""Adapters in the engine's few places: shared loads, least recently used leave, nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.workers.sample.adapter_lab import AdapterLab
from workers.sample import adapters
from workers.sample.engines.base import Cancelled
from workers.snapshot_files import BadSnapshot


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[AdapterLab]:
    made = AdapterLab(tmp_path)
    made.add("a", "b", "c", "d")
    yield made
    made.store.stop(5)


def test_the_base_model_needs_no_turn(lab: AdapterLab) -> None:
    lab.ask("r", None)
    assert lab.told == {"r": None}


def test_requests_of_one_snapshot_share_a_load_and_are_served_in_order(lab: AdapterLab) -> None:
    held = lab.blobs.hold("a")
    for i in range(5):
        lab.ask(f"r{i}", "a")
    lab.store.turn()
    assert not lab.told
    held.set()
    lab.heard("r4")
    assert lab.told == {f"r{i}": "a" for i in range(5)} and list(lab.told) == sorted(lab.told)
    assert lab.engine.loaded == ["a"]


def test_a_load_that_takes_long_holds_up_no_other(lab: AdapterLab) -> None:
    held = lab.blobs.hold("a")
    lab.ask("slow", "a")
    lab.ask("quick", "b")
    lab.heard("quick")
    assert "slow" not in lab.told
    held.set()
    lab.heard("slow")


def test_the_least_recently_used_of_the_idle_leaves(lab: AdapterLab) -> None:
    for request_id, snapshot_id in (("1", "a"), ("2", "b"), ("3", "a")):
        lab.ask(request_id, snapshot_id)
        lab.heard(request_id)
        lab.store.release(request_id)
    lab.ask("4", "c")
    lab.heard("4")
    assert sorted(lab.engine.loaded) == ["a", "c"]


def test_what_is_in_use_stays_and_the_next_waits_until_it_is_idle(lab: AdapterLab) -> None:
    lab.ask("1", "a")
    lab.ask("2", "b")
    lab.heard("1", "2")
    lab.ask("3", "c")
    lab.idle()
    assert "3" not in lab.told and sorted(lab.engine.loaded) == ["a", "b"]
    lab.store.release("2")
    lab.heard("3")
    assert sorted(lab.engine.loaded) == ["a", "c"] and lab.engine.most == 2


def test_an_adapter_that_left_is_loaded_again(lab: AdapterLab) -> None:
    for i, snapshot_id in enumerate("abcdabcd"):
        lab.ask(f"r{i}", snapshot_id)
        lab.heard(f"r{i}")
        lab.store.release(f"r{i}")
    assert [lab.told[f"r{i}"] for i in range(8)] == list("abcdabcd")
    assert lab.engine.most == 2


def test_a_request_without_room_goes_before_the_later_ones_of_a_busy_adapter(
    lab: AdapterLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.ask("a1", "a")
    lab.ask("a2", "a")
    lab.ask("b1", "b")
    lab.heard("a1", "a2", "b1")
    lab.ask("c1", "c")
    lab.store.turn()
    lab.ask("b2", "b")
    lab.heard("b2")
    monkeypatch.setattr(adapters, "_PATIENCE_S", 0.0)
    lab.store.release("b1")
    lab.store.turn()
    lab.ask("b3", "b")
    lab.ask("a3", "a")
    lab.heard("a3")
    assert "b3" not in lab.told, "the adapter with the fewest requests gets no new ones"
    lab.store.release("b2")
    lab.heard("c1")
    lab.store.release("c1")
    lab.heard("b3")


def test_a_failed_load_fails_its_own_requests_and_is_tried_again(lab: AdapterLab) -> None:
    held = lab.blobs.hold("a")
    lab.damage("a")
    lab.ask("1", "a")
    lab.ask("2", "a")
    lab.ask("3", "b")
    held.set()
    lab.heard("1", "2", "3")
    assert isinstance(lab.told["1"], BadSnapshot) and "damaged" in str(lab.told["1"])
    assert lab.told["2"] is lab.told["1"] and lab.told["3"] == "b"
    lab.add("a")
    lab.ask("4", "a")
    lab.heard("4")
    assert lab.told["4"] == "a"


def test_a_snapshot_without_files_is_bad(lab: AdapterLab) -> None:
    lab.ask("1", "nowhere")
    lab.heard("1")
    assert isinstance(lab.told["1"], BadSnapshot)


def test_a_request_can_be_cancelled_while_its_adapter_loads(lab: AdapterLab) -> None:
    held = lab.blobs.hold("a")
    lab.ask("1", "a")
    lab.ask("2", "a")
    lab.store.turn()
    assert lab.store.cancel("1") and not lab.store.cancel("1")
    assert isinstance(lab.told["1"], Cancelled)
    held.set()
    lab.heard("2")
    assert lab.told["2"] == "a" and isinstance(lab.told["1"], Cancelled)


def test_a_load_that_nobody_waits_for_any_more_leaves_the_adapter_idle(lab: AdapterLab) -> None:
    held = lab.blobs.hold("a")
    lab.ask("1", "a")
    lab.store.turn()
    lab.store.cancel("1")
    held.set()
    lab.idle()
    for request_id, snapshot_id in (("2", "b"), ("3", "c")):
        lab.ask(request_id, snapshot_id)
    lab.heard("2", "3")
    assert sorted(lab.engine.loaded) == ["b", "c"]


def test_it_stops_while_a_load_takes_long(tmp_path: Path) -> None:
    lab = AdapterLab(tmp_path)
    lab.add("a", "b")
    held = lab.blobs.hold("a")
    lab.ask("1", "a")
    lab.ask("2", "b")
    lab.heard("2")
    lab.store.stop(0.05)
    assert "1" not in lab.told and lab.engine.loaded == []
    held.set()


def test_a_snapshot_on_its_way_to_the_blob_store_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_AGAIN_S", 0.01)
    coming = {"late"}
    lab = AdapterLab(tmp_path, capacity=1, is_coming=lambda snapshot_id: snapshot_id in coming)
    lab.add("a")
    lab.ask("1", "late")
    lab.settle(lambda: lab.blobs.asked.count("late") > 2)
    lab.ask("2", "a")
    lab.heard("2")
    assert "1" not in lab.told
    lab.store.release("2")
    lab.add("late")
    coming.clear()
    lab.heard("1")
    assert lab.told["1"] == "late"
    lab.store.stop(5)


def test_a_snapshot_that_does_not_arrive_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_STORED_WITHIN_S", 0.0)
    lab = AdapterLab(tmp_path, is_coming=lambda snapshot_id: True)
    lab.ask("1", "late")
    lab.heard("1")
    assert isinstance(lab.told["1"], adapters.NotStored)
    lab.store.stop(5)
