"""What an operation looked up when it was accepted is gone, and its run is rebuilt all the same, bit for bit."""

from __future__ import annotations

import numpy as np
from sqlalchemy import delete

from app.custom_losses import service as custom_losses
from app.custom_losses.models import CustomLoss
from app.sampling.models import RecordedSample
from app.sampling.records import NewRecord, record, sequence_id
from app.wire import tinker_pb2 as pb
from tests.integration.test_http_custom_losses import upload
from tests.unit.workers.train.train_lab import Client, Lab, message, random_data, state_of


def custom_operation(lab: Lab, client: Client) -> int:
    session_id = client.model_id.partition(":train:")[0]
    custom_losses.create(lab.database, client.owner_id, upload(session_id))
    with lab.database.read() as session:
        identity = session.query(CustomLoss.id).scalar()
    data = random_data(3)
    for datum in data:
        datum.inputs["w"] = datum.inputs["weights"]  # type: ignore[index]
    config = {"loss_id": pb.LossConfigValue(text=identity)}
    return client.send(data, loss_fn="custom", loss_fn_config_v2=config)


def reinforce_operation(lab: Lab, client: Client) -> int:
    request_id = f"{client.model_id.partition(':train:')[0]}:sample:0:0"
    prompt, tokens, logprobs = [3, 4, 5], [6, 7, 8, 9], [-4.0, -4.5, -5.0, -4.2]
    response = pb.SampleResponse()
    response.sequences.add(tokens=np.int32(tokens).tobytes(), logprobs=np.float32(logprobs).tobytes())
    session_id = request_id.partition(":")[0]
    with lab.database.write() as session:
        new = NewRecord(request_id, client.owner_id, session_id, prompt, response.SerializeToString())
        record(session, [new])
    whole = [*prompt, *tokens]
    request = message(client.model_id, client._seq(None), [], loss_fn="stable_reinforce")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.int32(whole[:-1]).tobytes()
    arrays = {"target_tokens": np.int64(whole[1:]), "advantages": np.float32([0, 0, 1, -1, 1, 2])}
    for name, array in arrays.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dense = array.tobytes()
        tensor.dtype = pb.DTYPE_INT64 if array.dtype.kind == "i" else pb.DTYPE_FLOAT32
    for spans, first, n in ((datum.model_input_spans, 0, 3), (datum.loss_fn_input_spans, 1, 4)):
        spans.add().prompt_tokens.MergeFrom(
            pb.PromptProvenanceSpan(sequence_id=sequence_id(request_id, 0), offset=first, length=3 - first)
        )
        spans.add().sampled_tokens.MergeFrom(pb.SampledProvenanceSpan(sequence_id=sequence_id(request_id, 0), length=n))
    lab.service.forward_backward(client.owner_id, request)
    return request.seq_id


def test_a_run_is_rebuilt_when_losses_and_samples_are_gone(lab: Lab) -> None:
    client = lab.client()
    first = lab.worker(snapshot_operations=10_000)
    for operation in (custom_operation, reinforce_operation):
        seq_id = operation(lab, client)
        lab.work(first)
        client.output(seq_id)
        step = client.optim_step()
        lab.work(first)
        client.result(step)
    assert "custom/a:sum" in client.output(1).metrics
    assert client.output(3).metrics["kl_sample_train:mean"] != 0
    before = state_of(first, client)
    with lab.database.write() as session:
        session.execute(delete(CustomLoss))
        session.execute(delete(RecordedSample))
    lab.kill(first)
    second = lab.worker(snapshot_operations=10_000)
    lab.restore(second, client)
    assert state_of(second, client).same_bits(before)
