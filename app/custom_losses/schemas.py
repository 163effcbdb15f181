"""Bodies of the custom-loss route (WIRE §2.7)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from app.custom_losses.allowed import MAX_NAME_CHARACTERS
from app.schemas import Identifier, Request, SessionSeq


class CreateCustomLoss(Request):
    """`create_custom_loss`. The graph is checked node by node in `app.custom_losses.graph`."""

    session_id: Identifier
    custom_loss_seq_id: SessionSeq
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    inputs: list[Any]
    graph: dict[str, Any]
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CustomLossCreated(BaseModel):
    """The result of `create_custom_loss`."""

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
