"""What every process of a vLLM that a sample worker has started runs first (a `vllm.general_plugins` plugin).

A vLLM that somebody else starts on the same machine loads it too, and it leaves that alone.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Any

OWNER = "TINWORKS_VLLM_OWNER"
"""The process id of the sample worker, in the environment of all processes of its vLLM."""

_LOOK_OFTEN_S = 1.0
_LOOK_EVERY_MS = 1


def register() -> None:
    """The entry point. Raises AttributeError or ImportError if this vLLM is not built as the cures expect, which ends
    its start."""
    owner = os.environ.get(OWNER)
    if not owner:
        return
    if int(owner) != os.getpid():
        _die_with(int(owner))
    from vllm.platforms import current_platform

    from workers.sample.engines import vllm_cpu_experts, vllm_cpu_lora, vllm_prompt_scores

    _allow_any_temperature()
    vllm_prompt_scores.install()
    if current_platform.is_cpu():
        vllm_cpu_lora.install()
        vllm_cpu_experts.install()
        _clear_cache_blocks()
        _sleep_while_waiting()


def _allow_any_temperature() -> None:
    """vLLM takes temperatures from 0.01 to 2 and replaces or refuses others. It checks them once more where it decodes
    them, in a thread whose death nobody would notice."""
    from vllm import sampling_params

    parameters = sampling_params.SamplingParams
    verify = parameters._verify_args
    highest = 2.0

    def verify_rest(params: Any) -> None:
        temperature = params.temperature
        params.temperature = min(temperature, highest)
        verify(params)
        params.temperature = temperature

    if sampling_params._MAX_TEMP:
        sampling_params._MAX_TEMP = 0.0
        parameters._verify_args = verify_rest


def _clear_cache_blocks() -> None:
    """Attention on a CPU reads a block of the cache to its end, whoever filled it last, and multiplies by zero what is
    not its own: NaN stays NaN. An adapter that has diverged would spoil the samples of others that come after it."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    assert isinstance(KVCacheConfig.needs_kv_cache_zeroing, property)
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)


def _sleep_while_waiting() -> None:
    """vLLM's engine and its worker look for each other's messages without a pause for a second after each. Beside a GPU
    that saves microseconds of a step; here it takes a core from the model, and from everything else on the machine.

    So they sleep until they are told of a message. Such a notice may be lost: for that second they look every
    millisecond as well.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def wait_asleep(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = -1.0  # as if the last message had come long ago
        recent = time.monotonic() < condition.last_read + _LOOK_OFTEN_S
        wait(condition, _LOOK_EVERY_MS if recent else timeout_ms)

    SpinCondition.wait = wait_asleep


def _die_with(owner: int) -> None:
    """End this process when the worker ends, whatever it dies of: an orphan would keep the GPU's memory."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # not Linux, or a sandbox without the call
        return

    def wait() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="owner", daemon=True).start()
