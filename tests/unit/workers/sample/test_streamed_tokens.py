"""A streamed job hears of every token when it is drawn, and what was drawn while Redis was away is told afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakeredis import FakeRedis, FakeServer
from redis.exceptions import RedisError

from app.sampling.keys import TOKENS_FIELD, tokens_key
from app.wire.streaming import decode_tokens
from app.wire.types import SampleResult, StreamedToken
from tests.unit.workers.sample.native_lab import Inbox, Lab, ask, drain, prompt
from workers.sample.streams import TokenStreams


def test_the_tokens_told_are_those_of_the_result(lab: Lab) -> None:
    told: list[StreamedToken] = []
    inbox, engine = Inbox(), lab.engine()
    request = ask("r", prompt(5), num_samples=3, topk_sample_logprobs=2, max_tokens=6, seed=1)
    engine.submit(replace(inbox.job(request), on_token=told.append))
    engine.step()
    assert len(told) == 3, "each sequence's first token is told before the second is drawn"
    drain(engine)
    result = inbox["r"]
    assert isinstance(result, SampleResult)
    for index, sequence in enumerate(result.sequences):
        own = [token for token in told if token.index == index]
        assert [token.position for token in own] == list(range(6))
        assert [token.token for token in own] == sequence.tokens.tolist()
        assert np.array([token.logprob for token in own], np.float32).tolist() == sequence.logprobs.tolist()
        assert sequence.topk is not None
        assert [[id for id, _ in token.topk] for token in own] == sequence.topk.token_ids.tolist()


def stored(redis: FakeRedis, request_id: str) -> list[StreamedToken]:
    entries = redis.xrange(tokens_key(request_id))
    return [token for _, fields in entries for token in decode_tokens(fields[TOKENS_FIELD])]


def test_tokens_wait_for_redis_and_expire_there() -> None:
    server = FakeServer()
    redis = FakeRedis(server=server)
    streams = TokenStreams(redis)
    tokens = [StreamedToken(0, i, 7 + i, -0.5, [(7, -0.5), (8, -1.5)]) for i in range(3)]
    hear = streams.listener("r")
    hear(tokens[0])
    server.connected = False
    with pytest.raises(RedisError):
        streams.publish()
    hear(tokens[1])
    server.connected = True
    streams.publish()
    assert stored(redis, "r") == tokens[:2]
    hear(tokens[2])
    streams.publish()
    streams.publish()
    assert stored(redis, "r") == tokens
    assert redis.ttl(tokens_key("r")) > 0
