"""What is remembered for a while is forgotten, whoever asks for it or not."""

from __future__ import annotations

from app.recent import Recent


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_value_is_believed_for_its_time() -> None:
    clock = Clock()
    recent: Recent[str, int] = Recent(ttl_s=2.0, clock=clock)
    assert recent.get("a") is None
    recent.put("a", 1)
    clock.now = 1.9
    assert recent.get("a") == 1
    clock.now = 2.0
    assert recent.get("a") is None
    recent.put("a", 2)
    assert recent.get("a") == 2 and len(recent) == 1


def test_what_nobody_asks_for_again_leaves_when_others_come() -> None:
    clock = Clock()
    recent: Recent[int, int] = Recent(ttl_s=2.0, clock=clock)
    for number in range(1000):
        clock.now = number / 10
        recent.put(number, number)
        assert len(recent) <= 20
    assert recent.get(999) == 999


def test_one_that_was_put_again_stays_for_its_new_time() -> None:
    clock = Clock()
    recent: Recent[str, int] = Recent(ttl_s=2.0, clock=clock)
    recent.put("a", 1)
    recent.put("b", 1)
    clock.now = 1.5
    recent.put("a", 2)
    clock.now = 2.5
    recent.put("c", 1)
    assert (recent.get("a"), recent.get("b"), len(recent)) == (2, None, 2)


def test_of_too_many_the_oldest_leave() -> None:
    recent: Recent[int, int] = Recent(ttl_s=60.0, most=3, clock=Clock())
    for number in range(5):
        recent.put(number, number)
    assert [recent.get(number) for number in range(5)] == [None, None, 2, 3, 4]
