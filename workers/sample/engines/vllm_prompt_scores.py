"""Prompt logprobs in vLLM's (V1) model runner: the right adapter for each row, and answers to `Questions`.

vLLM maps the rows that it unembeds to adapters as if there were one row per request, that from which the next token is
drawn. The rows of a prompt that is to be scored do not fit that map: on a GPU all but the first go without their
adapter's unembedding, on a CPU the engine dies. So prompts are scored here one request at a time, under a map in which
every row has that request's adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workers.sample.engines.vllm_questions import ARGUMENT, Questions


def install() -> None:
    """Change the class of the runner, once per process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    score_all = GPUModelRunner._get_prompt_logprobs_dict
    if hasattr(score_all, "one_by_one"):
        return

    def score_each(runner: Any, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        wanted: dict[str, int] = runner.num_prompt_logprobs
        scores: dict[str, Any] = {}
        if not wanted:
            return scores
        try:
            with _adapter_rows(runner) as use:
                for request_id in list(wanted):
                    request = runner.requests[request_id]
                    use(request.lora_request)
                    runner.num_prompt_logprobs = {request_id: wanted[request_id]}
                    with _answering(runner, request):
                        scores |= score_all(runner, hidden_states, num_scheduled_tokens)
                    if not runner.num_prompt_logprobs:  # the prompt is through
                        del wanted[request_id]
        finally:
            runner.num_prompt_logprobs = wanted
        return scores

    score_each.one_by_one = True  # type: ignore[attr-defined]
    GPUModelRunner._get_prompt_logprobs_dict = score_each


@contextmanager
def _adapter_rows(runner: Any) -> Iterator[Callable[[Any], None]]:
    """While it lasts, whatever the runner unembeds gets the adapter that was last given to the yielded function, a
    `LoRARequest` or None. Rows go through in pieces of at most `max_num_seqs`: vLLM's maps have no room for more."""
    from vllm.lora.layers import LoRAMapping

    if getattr(runner, "lora_manager", None) is None:
        yield lambda lora_request: None
        return
    manager = runner.lora_manager._adapter_manager
    before = manager._last_mapping
    model, unembed = runner.model, runner.model.compute_logits
    piece: int = runner.scheduler_config.max_num_seqs
    adapter = 0

    def use(lora_request: Any) -> None:
        nonlocal adapter
        adapter = 0 if lora_request is None else lora_request.lora_int_id

    def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = []
        for rows in hidden_states.split(piece):
            ids = (adapter,) * len(rows)
            manager._set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
            parts.append(unembed(rows, *args, **kwargs))
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

    model.compute_logits = compute_logits
    try:
        yield use
    finally:
        del model.compute_logits
        if before is not None:
            manager._set_adapter_mapping(before)


@contextmanager
def _answering(runner: Any, request: Any) -> Iterator[None]:
    """While it lasts, what the runner gathers of a prompt's logprobs includes the answers to the request's
    questions."""
    asked = (request.sampling_params.extra_args or {}).get(ARGUMENT)
    if asked is None:
        yield
        return
    questions = Questions.unpacked(asked)
    sampler, gather = runner.sampler, runner.sampler.gather_logprobs
    start: int = request.num_computed_tokens + 1

    def gather_all(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        own = gather(logprobs, questions.k, token_ids)
        ids, values = questions.answers(logprobs, start)
        return own._replace(
            logprob_token_ids=torch.cat([own.logprob_token_ids, ids], 1), logprobs=torch.cat([own.logprobs, values], 1)
        )

    sampler.gather_logprobs = gather_all
    try:
        yield
    finally:
        del sampler.gather_logprobs
