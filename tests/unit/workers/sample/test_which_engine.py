"""A sample worker gets the engine that its settings, its roles and the machine allow."""

from __future__ import annotations

import pytest

from app.settings import Settings
from workers.sample.engines.vllm_options import VllmOptions, rank_bound
from workers.sample.start import CannotSample, engine_name


def chosen(roles: str, *, vllm: bool = True, cuda: bool = True, **settings: object) -> str:
    return engine_name(
        roles.split(","),
        Settings(**settings),  # type: ignore[arg-type]
        has_vllm=lambda: vllm,
        has_cuda=lambda: cuda,
    )


@pytest.mark.parametrize(
    ("roles", "vllm", "cuda", "expected"),
    [
        ("sample", True, True, "vllm"),
        ("sample", True, False, "native"),
        ("sample", False, True, "native"),
        ("train,sample", True, True, "native"),
        ("train", True, True, "native"),
    ],
)
def test_unless_something_is_asked_for(roles: str, vllm: bool, cuda: bool, expected: str) -> None:
    assert chosen(roles, vllm=vllm, cuda=cuda) == expected


@pytest.mark.parametrize("engine", ["vllm", "external"])
def test_a_worker_that_trains_cannot_sample_elsewhere(engine: str) -> None:
    with pytest.raises(CannotSample, match=f"TINWORKS_SAMPLE_ENGINE is {engine}.*-Q train and another with -Q sample"):
        chosen("train,sample", sample_engine=engine, vllm_url="http://x")
    assert chosen("train", sample_engine=engine) == "native"


def test_what_is_asked_for_and_missing_is_named() -> None:
    assert chosen("sample", sample_engine="vllm", cuda=False) == "vllm"
    with pytest.raises(CannotSample, match="not installed"):
        chosen("sample", sample_engine="vllm", vllm=False)
    assert chosen("sample", sample_engine="external", vllm_url="http://x") == "external"
    with pytest.raises(CannotSample, match="TINWORKS_VLLM_URL"):
        chosen("sample", sample_engine="external")


def options(**settings: object) -> VllmOptions:
    return VllmOptions.of(Settings(**settings), source="m", dtype="float32", context_length=100)  # type: ignore[arg-type]


def test_vllm_has_room_for_every_adapter_that_the_worker_keeps() -> None:
    assert (options().cpu_adapters, options().max_rank) == (64, 128)
    assert options(adapter_cache=3, vllm_max_loras=5).cpu_adapters == 5
    assert options(max_lora_rank=20).max_rank == 32
    assert options(vllm_max_lora_rank=9).max_rank == 16


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"vllm_max_model_len": 101}, "TINWORKS_VLLM_MAX_MODEL_LEN"),
        ({"vllm_max_loras": 4, "vllm_max_cpu_loras": 3}, "TINWORKS_VLLM_MAX_CPU_LORAS"),
        ({"max_lora_rank": 600}, "TINWORKS_VLLM_MAX_LORA_RANK"),
    ],
)
def test_settings_that_do_not_go_together_are_named(settings: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        options(**settings)


def test_the_bound_of_a_rank_is_one_that_vllm_has() -> None:
    assert [rank_bound(rank) for rank in (1, 2, 8, 9, 128, 129, 512)] == [1, 8, 8, 16, 128, 256, 512]
