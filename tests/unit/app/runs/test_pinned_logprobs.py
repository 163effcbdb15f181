"""Provenance spans become the recorded logprobs, or an error that names datum and span."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from app.errors import InvalidRequest
from app.runs.pinning import pin_logprobs, sequence_ids
from app.sampling.records import RecordedSequence
from app.wire import tinker_pb2 as pb
from app.wire.training import decode_forward_backward, parse_forward_backward
from app.wire.types import Datum, ProvenanceSpan

PROMPT, FIRST = (5, 6, 7), (8, 9)
SECOND_PROMPT, SECOND = (*PROMPT, *FIRST, 10, 11), (12, 13, 14)


def recorded(name: str, prompt: Sequence[int], tokens: Sequence[int], first: float) -> RecordedSequence:
    logprobs = np.float32([first - i / 8 for i in range(len(tokens))])
    return RecordedSequence(name, np.int32(tokens), logprobs, np.int32(prompt))


RECORD = {
    "a": recorded("a", PROMPT, FIRST, -1.0),
    "b": recorded("b", SECOND_PROMPT, SECOND, -2.0),
}


def prompt(name: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(False, name, offset, length)


def sampled(name: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(True, name, offset, length)


def two_turns() -> dict[str, object]:
    """Prompt, a first turn, two more tokens of the environment, a second turn."""
    whole = (*SECOND_PROMPT, *SECOND)
    return {
        "tokens": whole[:-1],
        "targets": whole[1:],
        "advantages": [0, 0, 1, 1, 0, 0, 2, 2, 2],
        "logprobs": [0, 0, -1.0, -1.125, 0, 0, -2.0, -2.125, -2.25],
        "inputs": [prompt("a", 0, 3), sampled("a", 0, 2), prompt("b", 5, 2), sampled("b", 0, 2)],
        "claims": [prompt("a", 1, 2), sampled("a", 0, 2), prompt("b", 5, 2), sampled("b", 0, 3)],
    }


def datum(**fields: object) -> Datum:
    values: dict = two_turns() | fields
    arrays = {"target_tokens": np.int64(values["targets"]), "advantages": np.float32(values["advantages"])}
    if values["logprobs"] is not None:
        arrays["logprobs"] = np.float32(values["logprobs"])
    return Datum(np.int32(values["tokens"]), arrays, values["inputs"], values["claims"])


def request(count: int) -> pb.ForwardBackwardRequest:
    message = pb.ForwardBackwardRequest(model_id="r", seq_id=1)
    for _ in range(count):
        message.data.add()
    return message


def pinned(each: Datum) -> list[float]:
    message = request(2)
    result = pin_logprobs(message, [datum(), each], RECORD)
    assert message == request(2), "the request itself stays as it came"
    body = parse_forward_backward(result.SerializeToString())
    return decode_forward_backward(body).data[1].inputs["logprobs"].tolist()


EXPECTED = [0, 0, -1.0, -1.125, 0, 0, -2.0, -2.125, -2.25]


def test_sampled_targets_get_the_logprobs_on_record() -> None:
    assert pinned(datum()) == EXPECTED


def test_the_logprobs_need_not_be_sent() -> None:
    assert pinned(datum(logprobs=None)) == EXPECTED


def test_targets_of_the_prompt_may_be_anything() -> None:
    assert pinned(datum(targets=[0, 0, *FIRST, 0, 0, *SECOND])) == EXPECTED


def test_a_tail_of_a_sequence_has_its_own_logprobs() -> None:
    tail = datum(
        tokens=(*SECOND_PROMPT, 12, 13),
        advantages=[0] * 6 + [0, 2, 2],
        inputs=[prompt("b", 0, 7), sampled("b", 0, 2)],
        claims=[prompt("b", 1, 6), prompt("b", 0, 1), sampled("b", 1, 2)],
        logprobs=None,
    )
    assert pinned(tail) == [0] * 7 + [-2.125, -2.25]


def test_only_spans_of_some_length_name_sequences() -> None:
    assert sequence_ids([datum(claims=[sampled("a", 0, 9), sampled("c", 0, 0)])]) == {"a", "b"}


SPANS, CLAIMS = "data[1].model_input_spans", "data[1].loss_fn_input_spans"
WRONG: dict[str, tuple[Callable[[], Datum], str, str]] = {
    "unknown sequence": (
        lambda: datum(claims=[prompt("a", 1, 2), sampled("zz", 0, 2), prompt("b", 5, 2), sampled("b", 0, 3)]),
        f"{CLAIMS}[1].sequence_id",
        "no sequence 'zz' of this session is on record; sample with record_stability_info=True",
    ),
    "beyond the sampled tokens": (
        lambda: datum(claims=[prompt("a", 1, 2), sampled("a", 1, 2), prompt("b", 5, 2), sampled("b", 0, 3)]),
        f"{CLAIMS}[1]",
        "offset 1 and length 2 exceed the 2 sampled tokens",
    ),
    "beyond the prompt": (
        lambda: datum(inputs=[prompt("a", 0, 4), sampled("a", 1, 1), prompt("b", 5, 2), sampled("b", 0, 2)]),
        f"{SPANS}[0]",
        "exceed the 3 prompt tokens",
    ),
    "another input": (lambda: datum(tokens=(5, 6, 9, *FIRST, 10, 11, 12, 13)), f"{SPANS}[0]", "model_input[2] is 9"),
    "another sampled input": (
        lambda: datum(tokens=(*PROMPT, 8, 8, 10, 11, 12, 13)),
        f"{SPANS}[1]",
        "model_input[4] is 8, on record is 9",
    ),
    "another target": (
        lambda: datum(targets=[6, 7, *FIRST, 10, 11, 12, 13, 13]),
        f"{CLAIMS}[3]",
        "target_tokens[8] is 13, on record is 14",
    ),
    "a target that is not the next input": (
        lambda: datum(inputs=[prompt("a", 0, 3), prompt("b", 3, 4), sampled("b", 0, 2)]),
        f"{CLAIMS}[1]",
        "target 2 is not what model_input_spans say of input 3",
    ),
    "an advantage on a prompt": (
        lambda: datum(advantages=[0, 1, 1, 1, 0, 0, 2, 2, 2]),
        "data[1].loss_fn_inputs['advantages']",
        "position 1 is not a sampled token",
    ),
    "another logprob": (
        lambda: datum(logprobs=[0, 0, -1.0, -1.5, 0, 0, -2.0, -2.125, -2.25]),
        "data[1].loss_fn_inputs['logprobs']",
        "position 3 is -1.5, on record is -1.125",
    ),
    "a logprob that is none": (
        lambda: datum(logprobs=[0, 0, float("nan"), -1.125, 0, 0, -2.0, -2.125, -2.25]),
        "data[1].loss_fn_inputs['logprobs']",
        "position 2 is nan",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_claim_that_is_not_so_names_datum_and_field(case: str) -> None:
    make, field, words = WRONG[case]
    with pytest.raises(InvalidRequest) as caught:
        pinned(make())
    assert caught.value.detail.startswith(f"{field}: ")
    assert words in caught.value.detail
