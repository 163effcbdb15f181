"""Cancelled jobs and bad adapters leave alone, and the others do not notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from app.wire.types import SampleRequest
from tests.engine_suite.models import CONTEXT, prompt
from tests.engine_suite.rig import WHO, Asked, Outcomes, Rig, ask
from workers.sample.engines.base import Cancelled
from workers.snapshot_files import BadSnapshot

LONG = CONTEXT - 20


def long_request(name: str, **options: object) -> SampleRequest:
    """One that takes far longer than a cancellation."""
    return ask(name, prompt(10), max_tokens=LONG, stop_tokens=(), **options)  # type: ignore[arg-type]


def others(rig: Rig, outcomes: Outcomes) -> list[Asked]:
    """Greedy requests of everybody, submitted."""
    asked = [
        Asked(ask(f"o{i}", prompt(4 + i), max_tokens=16, temperature=0.0, stop_tokens=()), WHO[i % len(WHO)])
        for i in range(5)
    ]
    for each in asked:
        rig.engine.submit(outcomes.job(each.request, rig.handles[each.who]))
    return asked


def check_all(rig: Rig, asked: list[Asked], outcomes: Outcomes) -> None:
    for each in asked:
        rig.check(each, outcomes.result(each.request.request_id))


@pytest.mark.parametrize("who", [None, "attention"])
def test_a_cancelled_request_ends_at_once(rig: Rig, who: str | None) -> None:
    outcomes = Outcomes()
    rest = others(rig, outcomes)
    request = long_request("x", num_samples=3)
    rig.engine.submit(outcomes.job(request, rig.handles[who], on_token=lambda: rig.engine.cancel("x")))
    rig.finish(outcomes, len(rest) + 1)
    assert isinstance(outcomes["x"], Cancelled)
    assert len(outcomes.streamed["x"]) < 3 * LONG
    check_all(rig, rest, outcomes)


def test_a_request_that_has_not_begun_is_cancelled(rig: Rig) -> None:
    outcomes = Outcomes()
    rig.engine.submit(outcomes.job(long_request("x")))
    rig.engine.cancel("x")
    rest = others(rig, outcomes)
    rig.finish(outcomes, len(rest) + 1)
    assert isinstance(outcomes["x"], Cancelled)
    check_all(rig, rest, outcomes)


def test_cancelling_what_is_done_or_unknown_does_nothing(rig: Rig) -> None:
    outcomes = Outcomes()
    [first, *rest] = others(rig, outcomes)
    rig.engine.cancel("nobody")
    rig.finish(outcomes, 5)
    rig.engine.cancel(first.request.request_id)
    rig.engine.step()
    check_all(rig, [first, *rest], outcomes)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def with_weights(folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    """Write every weight anew."""
    weights = dict(change(name, tensor) for name, tensor in weights_of(folder).items())
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


def of_another_width(folder: Path) -> None:
    with_weights(folder, lambda n, w: (n, torch.zeros(w.shape[0], w.shape[1] + 1) if "q_proj" in n else w))


def of_another_model(folder: Path) -> None:
    with_weights(folder, lambda n, w: (n.replace("layers.2", "layers.7"), w))


def of_another_rank_than_it_says(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 3}))


def torn(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:500])


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def without_sense(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def not_a_number(folder: Path) -> None:
    with_weights(folder, lambda n, w: (n, torch.full_like(w, float("nan"))))


@pytest.mark.parametrize(
    "spoil",
    [of_another_width, of_another_model, of_another_rank_than_it_says, torn, without_weights, without_sense],
    ids=lambda spoil: spoil.__name__,
)
def test_an_adapter_that_cannot_be_loaded_is_refused_while_others_run(
    rig: Rig, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(rig.folder / "adapter-1", tmp_path / "bad")
    spoil(folder)
    outcomes = Outcomes()
    rest = others(rig, outcomes)
    with pytest.raises(BadSnapshot):
        rig.load(f"bad-{spoil.__name__}", folder)
    rig.finish(outcomes, len(rest))
    check_all(rig, rest, outcomes)


def test_an_adapter_that_computes_no_numbers_fails_its_own_requests_only(rig: Rig, tmp_path: Path) -> None:
    """It may be refused when it is loaded, or its requests may fail."""
    folder = shutil.copytree(rig.folder / "adapter-1", tmp_path / "nan")
    not_a_number(folder)
    outcomes = Outcomes()
    try:
        handle = rig.load("nan", folder)
    except BadSnapshot:
        return
    rest = others(rig, outcomes)
    for i in range(3):
        rig.engine.submit(outcomes.job(ask(f"x{i}", prompt(5 + i), max_tokens=8), handle))
    rig.finish(outcomes, len(rest) + 3)
    assert all(isinstance(outcomes[f"x{i}"], Exception) for i in range(3))
    check_all(rig, rest, outcomes)
    again = Outcomes()
    rig.engine.unload_adapter(handle)
    rest = others(rig, again)
    rig.finish(again, len(rest))
    check_all(rig, rest, again)


def test_a_request_ends_with_the_adapter_that_it_began_with(rig: Rig) -> None:
    """Also if that leaves meanwhile, and comes back under another name."""
    handle = rig.load("leaving", shutil.copytree(rig.folder / "adapter-2", rig.folder / "leaving"))
    outcomes = Outcomes()
    asked = Asked(ask("x", prompt(9), max_tokens=30, temperature=0.0, stop_tokens=()), "unembedding")
    unloaded: list[bool] = []

    def unload() -> None:
        if not unloaded:
            unloaded.append(True)
            rig.engine.unload_adapter(handle)

    rig.engine.submit(outcomes.job(asked.request, handle, on_token=unload))
    rig.turn_until(lambda: bool(unloaded))
    again = rig.load("back", shutil.copytree(rig.folder / "adapter-2", rig.folder / "back"))
    more = Asked(ask("y", prompt(9), max_tokens=8, temperature=0.0, stop_tokens=()), "unembedding")
    rig.engine.submit(outcomes.job(more.request, again))
    rig.finish(outcomes, 2)
    for each in (asked, more):
        rig.check(each, outcomes.result(each.request.request_id))
    rig.engine.unload_adapter(again)
