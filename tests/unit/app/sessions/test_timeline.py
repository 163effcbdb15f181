"""Timelines: slices never cross on a lane, and every operation is drawn from its acceptance to its end."""

from __future__ import annotations

import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.sessions.timeline import Step, encode_trace
from app.wire import perfetto_pb2 as pb

BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
NOW = BEGAN + timedelta(seconds=100)


def step(seq_id: int, start_s: int, stop_s: int | None, error: str | None = None) -> Step:
    finished = None if stop_s is None else BEGAN + timedelta(seconds=stop_s)
    return Step(seq_id, "forward", "done", 7, error, BEGAN + timedelta(seconds=start_s), finished)


def slices(trace: bytes) -> dict[int, list[tuple[int, int, int]]]:
    """Per track: (begin, end, seq_id) in the order in which they are written, which has to be that of time."""
    found: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    open_since: dict[int, tuple[int, int]] = {}
    for packet in pb.Trace.FromString(trace).packet:
        event = packet.track_event
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_since
            open_since[event.track_uuid] = packet.timestamp, event.debug_annotations[0].int_value
        elif event.type == pb.TrackEvent.TYPE_SLICE_END:
            begin, seq_id = open_since.pop(event.track_uuid)
            found[event.track_uuid].append((begin, packet.timestamp, seq_id))
    assert not open_since
    return found


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), max_size=30))
def test_slices_of_a_lane_never_cross(spans: list[tuple[int, int]]) -> None:
    steps = [step(i, start, start + length) for i, (start, length) in enumerate(sorted(spans))]
    lanes = slices(encode_trace(BEGAN, NOW, [("run", steps)]))
    assert sorted(seq_id for lane in lanes.values() for _, _, seq_id in lane) == list(range(len(steps)))
    for lane in lanes.values():
        assert all(begin < end for begin, end, _ in lane)
        assert all(before[1] <= after[0] for before, after in pairwise(lane))


def test_a_queue_of_many_operations_is_drawn_in_time() -> None:
    steps = [step(seq_id, 0, None) for seq_id in range(30_000)]
    began = time.process_time()
    trace = encode_trace(BEGAN, NOW, [("run", steps)])
    assert time.process_time() - began < 6
    assert len(slices(trace)) == len(steps)


def test_what_has_not_ended_is_drawn_until_now() -> None:
    (lane,) = slices(encode_trace(BEGAN, NOW, [("run", [step(1, 2, None)])])).values()
    assert lane == [(2 * 10**9, 100 * 10**9, 1)]


def test_each_run_has_a_track_with_its_lanes_below_it() -> None:
    trace = pb.Trace.FromString(
        encode_trace(BEGAN, NOW, [("a", [step(1, 0, 5), step(2, 1, 3)]), ("b", [step(1, 0, 1)])])
    )
    tracks = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    parents = {track.uuid: track.name for track in tracks}
    assert [(track.name, parents.get(track.parent_uuid)) for track in tracks] == [
        ("a", None),
        ("lane 0", "a"),
        ("lane 1", "a"),
        ("b", None),
        ("lane 0", "b"),
    ]


def test_an_error_is_shown_with_its_slice() -> None:
    trace = pb.Trace.FromString(encode_trace(BEGAN, NOW, [("run", [step(1, 0, 1, error="data: empty")])]))
    (begin,) = (p.track_event for p in trace.packet if p.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN)
    assert {a.name: a.string_value for a in begin.debug_annotations}["error"] == "data: empty"
