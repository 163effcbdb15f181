"""vLLM without a service around it: `AsyncLLM` in a process of its own, which does what it is told over a pipe.

`RawVllm` starts it, with the Python of vLLM's environment; the engine is started exactly as our worker starts it. The
other side of the pipe is this module's `main`: one line of JSON in (a `Burst`), one out (seconds).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Burst:
    """Requests that are sent at once: random prompts from `seed`, so many tokens each at temperature 1, adapters in
    turn."""

    requests: int
    tokens: int
    seed: int
    adapters: Sequence[str] = ()

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The prompts; those of another seed have no beginning in common with them."""
        draw = np.random.default_rng(self.seed)
        return draw.integers(0, vocab_size, (self.requests, PROMPT_TOKENS)).tolist()


class RawVllm:
    """A running `AsyncLLM`. Only one at a time may ask."""

    def __init__(self, python: Path, model: Path, environment: Mapping[str, str]) -> None:
        """Starts it and waits until it answers. Raises RuntimeError if it ends."""
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__)), "--model", str(model)],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the raw vLLM has ended; its log is above")

    def run(self, burst: Burst) -> float:
        """Seconds from the first request to the last token."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(burst)) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def __enter__(self) -> RawVllm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


async def serve(model: str) -> None:
    """Start the engine, then do what each line of standard input says."""
    from transformers import AutoConfig
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from app.settings import get_settings
    from workers.sample.engines.vllm_loop import prepare_environment
    from workers.sample.engines.vllm_options import VllmOptions
    from workers.sample.start import sampling_dtype

    prepare_environment()
    config = AutoConfig.from_pretrained(model)
    settings = get_settings()
    dtype = str(sampling_dtype(settings)).removeprefix("torch.")
    options = VllmOptions.of(settings, source=model, dtype=dtype, context_length=config.max_position_embeddings)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options.arguments()))
    loras: dict[str, LoRARequest] = {}

    async def sample(name: str, prompt: list[int], tokens: int, adapter: str | None) -> None:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        lora = None if adapter is None else loras[adapter]
        async for output in llm.generate({"prompt_token_ids": prompt}, params, name, lora_request=lora):
            assert len(output.outputs[0].token_ids) == tokens

    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        burst = Burst(**json.loads(line))
        for folder in burst.adapters:
            if folder not in loras:
                loras[folder] = LoRARequest(folder, len(loras) + 1, folder)
                await llm.add_lora(loras[folder])
        prompts = burst.prompts(config.vocab_size)
        who = [burst.adapters[i % len(burst.adapters)] if burst.adapters else None for i in range(len(prompts))]
        begin = time.perf_counter()
        await asyncio.gather(
            *(sample(f"{burst.seed}-{i}", prompt, burst.tokens, who[i]) for i, prompt in enumerate(prompts))
        )
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)


def main() -> None:
    """The process that `RawVllm` starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    asyncio.run(serve(parser.parse_args().model))


if __name__ == "__main__":
    main()
