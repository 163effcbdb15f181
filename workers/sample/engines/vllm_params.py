"""What vLLM is asked for one sequence of a request (WIRE §5.5, SEMANTICS §6).

Each sequence is a vLLM request of its own, so that its seed is its own; they share the prompt through the prefix cache.
"""

from __future__ import annotations

from typing import Any

from workers.sample.engines.draw import GREEDY_BELOW, stream
from workers.sample.engines.tickets import Ticket
from workers.sample.engines.vllm_questions import ARGUMENT, Questions

LEAST_TOP_P = 1e-9
"""A top p that leaves the most probable token alone, as 0 does here; vLLM wants it above 0."""


def sequence_params(
    ticket: Ticket, index: int, questions: Questions | None, *, vocab_size: int, piecewise: bool
) -> Any:
    """The `SamplingParams` of sequence `index`. `piecewise`: its tokens come as they are drawn, else all at the end.
    `questions` about the prompt: None for all sequences but one.

    The end of a sequence by text is decided here, not by vLLM, so that it needs no tokenizer.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted = ticket.request.params
    greedy = wanted.temperature < GREEDY_BELOW
    packed = None if questions is None else questions.packed()
    return SamplingParams(
        temperature=0.0 if greedy else wanted.temperature,
        top_k=wanted.top_k if 0 < wanted.top_k < vocab_size and not greedy else 0,
        top_p=1.0 if greedy else min(1.0, max(LEAST_TOP_P, wanted.top_p)),
        seed=None if wanted.seed is None else stream(wanted.seed, index) >> 1,
        max_tokens=ticket.limit,
        ignore_eos=True,
        stop_token_ids=[token for token in ticket.stops.tokens if 0 <= token < vocab_size],
        logprobs=min(ticket.request.topk_sample_logprobs, vocab_size),
        prompt_logprobs=None if questions is None else questions.columns,
        extra_args=None if packed is None else {ARGUMENT: packed},
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if piecewise else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
