"""The protocol by hand, for requests that no SDK would send: in the wrong order, twice, or wrong."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import httpx
import numpy as np

from app.wire import tinker_pb2 as pb


class WireClient:
    """Speaks HTTP to a service with a key of its own."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        key = api_key or f"tml-{uuid.uuid4().hex}"
        self.http = httpx.Client(base_url=f"{base_url}/api/v1", headers={"X-API-Key": key}, timeout=60)
        self._models = itertools.count()
        self.session_id = self.post("create_session", {"sdk_version": "0.38.0"}).json()["session_id"]

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST JSON."""
        return self.http.post(path, json=body)

    def wait(self, request_id: str) -> httpx.Response:
        """Poll until a future is done."""
        while True:
            headers = {"Accept": "application/x-protobuf"}
            answer = self.http.post("retrieve_future", json={"request_id": request_id}, headers=headers)
            if answer.status_code != 408:
                return answer

    def create_run(self, *, optimizer: dict[str, Any] | None = None, **lora: Any) -> str:
        """A run of the tiny model; returns its id."""
        body = {
            "session_id": self.session_id,
            "model_seq_id": next(self._models),
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 1, **lora},
            "optimizer_config": optimizer or {"type": "adamw"},
        }
        future = self.post("create_model", body).json()
        answer = self.wait(future["request_id"]).json()
        assert "error" not in answer, answer
        return str(answer["model_id"])

    def forward_backward(self, run: str, seq_id: int, rows: list[list[int]], **fields: Any) -> httpx.Response:
        """Next-token cross entropy over rows of tokens."""
        return self.send(self.message(run, seq_id, rows, **fields))

    @staticmethod
    def message(run: str, seq_id: int, rows: list[list[int]], **fields: Any) -> pb.ForwardBackwardRequest:
        """The protobuf message of that."""
        message = pb.ForwardBackwardRequest(model_id=run, seq_id=seq_id, loss_fn="cross_entropy", **fields)
        for row in rows:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(row[:-1], "<i4").tobytes()
            target = datum.loss_fn_inputs["target_tokens"]
            target.dense, target.dtype = np.asarray(row[1:], "<i8").tobytes(), pb.DTYPE_INT64
        return message

    def send(self, message: pb.ForwardBackwardRequest) -> httpx.Response:
        """POST a protobuf forward_backward."""
        headers = {"Content-Type": "application/x-protobuf"}
        return self.http.post("forward_backward", content=message.SerializeToString(), headers=headers)

    def optim_step(self, run: str, seq_id: int, lr: float = 2e-3, **fields: Any) -> httpx.Response:
        """An AdamW step."""
        params = {"learning_rate": lr, "eps": 1e-8}
        return self.post("optim_step", {"model_id": run, "seq_id": seq_id, "adam_params": params, **fields})

    def logprobs(self, run: str, seq_id: int, rows: list[list[int]]) -> np.ndarray:
        """What the run's present weights give the rows, concatenated."""
        future = self.forward_backward(run, seq_id, rows, forward_only=True).json()
        output = pb.ForwardBackwardOutput.FromString(self.wait(future["request_id"]).content)
        return np.concatenate([np.frombuffer(r.fields["logprobs"].data, "<f4") for r in output.loss_fn_outputs])
