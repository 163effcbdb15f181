"""Which engine a worker samples with: from its roles, its settings and what is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Literal

import torch

from app.settings import Settings
from workers.model.base import BaseModel
from workers.model.serving import pin_devices
from workers.sample.engines.base import Engine
from workers.sample.engines.native import NativeEngine
from workers.sample.engines.stops import Decode

EngineName = Literal["native", "vllm", "external"]


class CannotSample(ValueError):
    """The worker cannot have the engine that its settings ask for; the message says what to change."""


def has_vllm() -> bool:
    """Whether vLLM can be imported. It is not: that takes seconds."""
    return find_spec("vllm") is not None


def engine_name(
    roles: Sequence[str],
    settings: Settings,
    *,
    has_vllm: Callable[[], bool] = has_vllm,
    has_cuda: Callable[[], bool] = torch.cuda.is_available,
) -> EngineName:
    """The engine of a worker with these roles; `native` also for one that only trains. Raises CannotSample."""
    wanted = settings.sample_engine
    if "sample" not in roles:
        return "native"
    if wanted == "auto":
        return "vllm" if "train" not in roles and has_cuda() and has_vllm() else "native"
    if wanted != "native" and "train" in roles:
        raise CannotSample(
            f"TINWORKS_SAMPLE_ENGINE is {wanted}, which does not share the weights of a worker that trains too: start "
            "one worker with -Q train and another with -Q sample, or use the native engine"
        )
    if wanted == "vllm" and not has_vllm():
        raise CannotSample(
            "TINWORKS_SAMPLE_ENGINE is vllm, which is not installed here: docs/sampling.md says how to install it"
        )
    if wanted == "external" and not settings.vllm_url:
        raise CannotSample("TINWORKS_SAMPLE_ENGINE is external: say in TINWORKS_VLLM_URL where the vLLM server is")
    return wanted


def sampling_dtype(settings: Settings) -> torch.dtype:
    """That of the weights which a sampler serves: the trainer's."""
    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def outline(settings: Settings, source: str) -> BaseModel:
    """The model of a worker whose engine has the weights elsewhere."""
    pin_devices(settings)
    return BaseModel.outline(source, dtype=sampling_dtype(settings))


def make_engine(name: EngineName, base: BaseModel, settings: Settings, *, decode: Decode) -> Engine:
    """The engine, ready to serve. `base`: the model for `native`, else its `outline`. Raises CannotSample or
    ValueError."""
    if name == "native":
        return NativeEngine(base, decode=decode, max_rows=settings.max_running_sequences)
    if name == "external":
        from workers.sample.engines.external import ExternalEngine, ExternalOptions

        return ExternalEngine(base, ExternalOptions.of(settings), decode=decode)
    from workers.sample.engines.vllm import VllmEngine
    from workers.sample.engines.vllm_options import VllmOptions

    if settings.torch_threads:  # on a CPU: so many threads, wherever there is room
        os.environ["OMP_NUM_THREADS"] = str(settings.torch_threads)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    options = VllmOptions.of(
        settings,
        source=base.name_or_path,
        dtype=str(base.dtype).removeprefix("torch."),
        context_length=base.facts.context_length,
    )
    return VllmEngine(base, options, decode=decode)
