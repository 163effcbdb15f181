"""What every request field does: for each, two values that make a difference, a value that is refused by name, or the
reason why it changes nothing."""

from __future__ import annotations

from tests.e2e.field_checks import Check, Probe
from tests.e2e.field_probes_compat import chat, completion, render
from tests.e2e.field_probes_rest import copy_weights, create_session, finish, search, set_ttl
from tests.e2e.field_probes_sampling import (
    retrieve_futures,
    sample,
    sampling_session,
    save_ephemeral,
    save_weights,
    scored,
    scored_sparsely,
)
from tests.e2e.field_probes_training import (
    create_from,
    create_model,
    cross_entropy,
    custom,
    dimuon_step,
    json_forward,
    json_forward_backward,
    json_sparse,
    load,
    optim_step,
    ppo,
    sparse,
    stable_reinforce,
)
from tests.e2e.request_fields_compat import COMPAT
from tests.e2e.request_fields_losses import LOSSES
from tests.e2e.request_fields_rest import REST
from tests.e2e.request_fields_sampling import SAMPLING
from tests.e2e.request_fields_training import TRAINING

CHECKS: tuple[Check, ...] = (*TRAINING, *LOSSES, *SAMPLING, *REST, *COMPAT)

STEADY: tuple[Probe, ...] = (
    chat,
    completion,
    copy_weights,
    create_from,
    create_model,
    create_session,
    cross_entropy,
    custom,
    dimuon_step,
    finish,
    json_forward,
    json_forward_backward,
    json_sparse,
    load,
    optim_step,
    ppo,
    render,
    retrieve_futures,
    sample,
    sampling_session,
    save_ephemeral,
    save_weights,
    scored,
    scored_sparsely,
    search,
    set_ttl,
    sparse,
    stable_reinforce,
)
"""Probes whose observations are compared."""
