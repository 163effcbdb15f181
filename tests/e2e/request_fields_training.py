"""What each field of the training requests does."""

from __future__ import annotations

from tests.e2e.field_checks import Check, decides, differs, inert, refused
from tests.e2e.field_probes_training import (
    DIMUON,
    N,
    create_from,
    create_model,
    cross_entropy,
    custom,
    dimuon_step,
    f4,
    floats,
    i4,
    i8,
    ints,
    json_forward,
    json_forward_backward,
    json_sparse,
    load,
    optim_step,
    ppo,
    spanned,
    sparse,
    stable_reinforce,
)
from tests.e2e.field_world import ABSENT, ROWS

SHIFTED = [token + 1 for token in ROWS[0][:-1]]
J, F = "forward_backward_input", "forward_input"
PROVENANCE = "only stable_reinforce looks provenance up; the cookbook sends it with every loss"

RUNS: tuple[Check, ...] = (
    refused("CreateModelRequest.session_id", create_model, {"session_id": "nobody"}),
    differs("CreateModelRequest.model_seq_id", create_model, {"model_seq_id": 901}, {"model_seq_id": 902}),
    refused("CreateModelRequest.model_seq_id", create_model, {"model_seq_id": -1}),
    refused("CreateModelRequest.base_model", create_model, {"base_model": "no/such"}, "base_model", "no/such"),
    differs("CreateModelRequest.user_metadata", create_model, {"user_metadata": {"a": "1"}}, {}),
    refused("CreateModelRequest.lora_config", create_model, {"lora_config": ABSENT}),
    differs("LoraConfig.rank", create_model, {"lora_config.rank": 3}, {}),
    refused("LoraConfig.rank", create_model, {"lora_config.rank": 4096}),
    differs("LoraConfig.seed", create_model, {"lora_config.seed": 2}, {}),
    differs("LoraConfig.train_unembed", create_model, {"lora_config.train_unembed": False}, {}),
    differs("LoraConfig.train_mlp", create_model, {"lora_config.train_mlp": False}, {}),
    differs("LoraConfig.train_attn", create_model, {"lora_config.train_attn": False}, {}),
    differs(
        "CreateModelRequest.optimizer_config & DimuonOptimizerConfig.type & AdamOptimizerConfig.type",
        create_model,
        {"optimizer_config": DIMUON},
        {},
    ),
    refused("DimuonOptimizerConfig.version", create_model, {"optimizer_config": {**DIMUON, "version": 2}}),
    refused("OptimizerConfigBase.type", create_model, {"optimizer_config": {"type": "sgd"}}, "optimizer_config.type"),
    refused("CreateModelRequest.type", create_model, {"type": "get_info"}),
    # -- of a checkpoint
    refused("LoadWeightsRequest.session_id", create_from, {"session_id": "nobody"}),
    differs("LoadWeightsRequest.model_seq_id", create_from, {"model_seq_id": 903}, {"model_seq_id": 904}),
    decides(
        "LoadWeightsRequest.base_model", create_from, {"base_model": "tiny"}, {"base_model": "no/such"}, "base_model"
    ),
    differs("LoadWeightsRequest.user_metadata", create_from, {"user_metadata": {"a": "1"}}, {}),
    differs("LoadWeightsRequest.path", create_from, {"path": "$later_weights"}, {}),
    differs("LoadWeightsRequest.optimizer", create_from, {"optimizer": True}, {}),
    differs("LoadWeightsRequest.optimizer_config", create_from, {"optimizer_config": DIMUON}, {}),
    decides(
        "LoadWeightsRequest.weights_access_token",
        create_from,
        {"path": "$others_weights", "weights_access_token": "$other_key"},
        {"path": "$others_weights"},
        "path",
    ),
    refused("LoadWeightsRequest.weights_access_token", create_from, {"weights_access_token": "tml"}),
    refused("LoadWeightsRequest.type", create_from, {"type": "create_model"}),
    # -- into a run
    refused("LoadWeightsRequest.model_id", load, {"model_id": "nobody:train:0"}),
    refused("LoadWeightsRequest.seq_id", load, {"seq_id": 0}),
    differs("LoadWeightsRequest.path", load, {"path": "$later_weights"}, {}),
    refused("LoadWeightsRequest.path", load, {"path": "tinker://nobody:train:0/weights/x"}),
    differs("LoadWeightsRequest.optimizer", load, {"optimizer": True}, {}),
    decides(
        "LoadWeightsRequest.weights_access_token",
        load,
        {"path": "$others_weights", "weights_access_token": "$other_key"},
        {"path": "$others_weights"},
        "path",
    ),
    refused("LoadWeightsRequest.type", load, {"type": "save_weights"}),
)

STEPS: tuple[Check, ...] = (
    refused("OptimStepRequest.model_id", optim_step, {"model_id": "nobody:train:0"}),
    refused("OptimStepRequest.seq_id", optim_step, {"seq_id": 0}),
    refused("OptimStepRequest.adam_params", optim_step, {"adam_params": ABSENT}),
    refused("OptimStepRequest.optim_params", optim_step, {"optim_params": {"learning_rate": 1.0}}),
    refused("OptimStepRequest.type", optim_step, {"type": "step"}),
    differs("AdamParams.learning_rate", optim_step, {"adam_params.learning_rate": 2e-2}, {}),
    differs("AdamParams.beta1", optim_step, {"adam_params.beta1": 0.1}, {}),
    differs("AdamParams.beta2", optim_step, {"adam_params.beta2": 0.5}, {}),
    differs("AdamParams.eps", optim_step, {"adam_params.eps": 0.1}, {}),
    differs("AdamParams.weight_decay", optim_step, {"adam_params.weight_decay": 50.0}, {}),
    differs("AdamParams.grad_clip_norm", optim_step, {"adam_params.grad_clip_norm": 1e-6}, {}),
    refused("OptimStepRequest.optimizer_params", dimuon_step, {"optimizer_params": ABSENT}),
    refused("OptimStepRequest.adam_params", dimuon_step, {"adam_params": {"learning_rate": 0.1}}),
    refused("OptimStepRequest.type", dimuon_step, {"type": "step"}),
    refused(
        "DimuonParams.type & OptimParamsBase.type", dimuon_step, {"optimizer_params.type": "sgd"}, "optimizer_params"
    ),
    differs("DimuonParams.learning_rate", dimuon_step, {"optimizer_params.learning_rate": 2e-2}, {}),
    differs("DimuonParams.grad_clip_norm", dimuon_step, {"optimizer_params.grad_clip_norm": 1e-6}, {}),
    differs("DimuonParams.beta1", dimuon_step, {"optimizer_params.beta1": 0.1}, {}),
)

D = "data.0."
PASSES: tuple[Check, ...] = (
    refused("proto ForwardBackwardRequest.model_id", cross_entropy, {"model_id": "nobody:train:0"}),
    refused("proto ForwardBackwardRequest.seq_id", cross_entropy, {"seq_id": 0}),
    refused("proto ForwardBackwardRequest.data", cross_entropy, {"data": []}),
    differs("proto ForwardBackwardRequest.loss_fn", ppo, {"loss_fn": "importance_sampling"}, {}),
    refused("proto ForwardBackwardRequest.loss_fn", ppo, {"loss_fn": "magic"}),
    differs("proto ForwardBackwardRequest.loss_fn_config", ppo, {"loss_fn_config": {"clip_high_threshold": 2.0}}, {}),
    differs(
        "proto ForwardBackwardRequest.loss_fn_config_v2 & proto LossConfigValue.number",
        ppo,
        {"loss_fn_config": {"clip_high_threshold": 2.0}, "loss_fn_config_v2": {"clip_high_threshold": {"number": 3.0}}},
        {"loss_fn_config": {"clip_high_threshold": 2.0}},
    ),
    refused(
        "proto LossConfigValue.text", ppo, {"loss_fn_config_v2": {"clip_high_threshold": {"text": "x"}}}, "clip_high"
    ),
    decides("proto LossConfigValue.text", custom, {}, {"pass.loss_fn_config_v2.loss_id.text": "x"}, "loss_id"),
    differs("proto ForwardBackwardRequest.forward_only", cross_entropy, {"forward_only": True}, {}),
    differs(
        "proto Datum.model_input & proto Chunk.encoded_text & proto EncodedTextChunk.tokens",
        cross_entropy,
        {D + "model_input.0.encoded_text.tokens": i4(*SHIFTED)},
        {},
    ),
    refused("proto EncodedTextChunk.tokens", cross_entropy, {D + "model_input.0.encoded_text.tokens": "AAA="}),
    refused(
        "proto Chunk.image & proto ImageChunk.data & proto ImageChunk.format & proto ImageChunk.expected_tokens"
        " & proto ImageChunk.override_dimensions & proto ImageDimensions.width & proto ImageDimensions.height",
        cross_entropy,
        {
            D + "model_input.0": {
                "image": {
                    "data": "AAAA",
                    "format": "png",
                    "expected_tokens": 4,
                    "override_dimensions": {"width": 1, "height": 1},
                }
            }
        },
        "data[0].model_input.chunks[0]",
        "image",
    ),
    refused(
        "proto Chunk.dmel & proto DmelChunk.dmel",
        cross_entropy,
        {D + "model_input.0": {"dmel": {"dmel": "AA"}}},
        "dmel",
    ),
    differs(
        "proto Datum.loss_fn_inputs & proto Tensor.dense",
        cross_entropy,
        {D + "loss_fn_inputs.weights": floats(*[0.5] * N)},
        {},
    ),
    refused("proto Datum.loss_fn_inputs", cross_entropy, {D + "loss_fn_inputs.weihgts": floats(*[0.5] * N)}, "weihgts"),
    refused("proto Tensor.dense", cross_entropy, {D + "loss_fn_inputs.target_tokens": ints(1, 2)}, "target_tokens"),
    refused("proto Tensor.dtype", cross_entropy, {D + "loss_fn_inputs.target_tokens.dtype": "DTYPE_INT32"}),
    refused("proto Tensor.shape", cross_entropy, {D + "loss_fn_inputs.target_tokens.shape": [N + 1]}),
    differs(
        "proto Tensor.shape",
        cross_entropy,
        {D + "loss_fn_inputs.target_tokens": ints(*range(10, 10 + 2 * N), shape=[N, 2])},
        {},
    ),
    differs(
        "proto Tensor.sparse_csr & proto SparseCsr.values",
        sparse,
        {D + "loss_fn_inputs.weights.sparse_csr.values": f4(1.0, 1.0, 1.0, 1.0)},
        {},
    ),
    differs(
        "proto SparseCsr.crow_indices",
        sparse,
        {
            D + "loss_fn_inputs.weights.sparse_csr.crow_indices": i8(0, 2, 2, 3, 4),
            D + "loss_fn_inputs.weights.sparse_csr.col_indices": i8(0, 1, 0, 0),
        },
        {D + "loss_fn_inputs.weights.sparse_csr.col_indices": i8(0, 1, 0, 0)},
    ),
    differs(
        "proto SparseCsr.col_indices",
        sparse,
        {D + "loss_fn_inputs.weights.sparse_csr.col_indices": i8(1, 0, 0, 1)},
        {},
    ),
    refused(
        "proto SparseCsr.col_indices",
        sparse,
        {D + "loss_fn_inputs.weights.sparse_csr.col_indices": i8(2, 0, 0, 0)},
        "weights",
        "sparse index",
    ),
)

SPANS: tuple[Check, ...] = (
    refused("proto Datum.model_input_spans", stable_reinforce, {D + "model_input_spans": []}),
    refused("proto Datum.loss_fn_input_spans", stable_reinforce, {D + "loss_fn_input_spans": []}),
    inert(
        "proto Datum.model_input_spans & proto Datum.loss_fn_input_spans",
        spanned,
        {},
        {D + "model_input_spans": [], D + "loss_fn_input_spans": []},
        why=PROVENANCE,
    ),
    refused("proto Datum.model_input_spans", spanned, {D + "model_input_spans": []}),
    refused("proto Datum.loss_fn_input_spans", spanned, {D + "loss_fn_input_spans": []}),
    differs(
        "proto SampledProvenanceSpan.sequence_id & SampledProvenanceSpan.sequence_id"
        " & proto ProvenanceSpan.sampled_tokens",
        stable_reinforce,
        {
            f"{D}{kind}_spans.{i}.{arm}.sequence_id": "$later_record_id"
            for kind in ("model_input", "loss_fn_input")
            for i, arm in enumerate(("prompt_tokens", "sampled_tokens"))
        },
        {},
    ),
    decides(
        "SampleRequest.record_stability_info",
        stable_reinforce,
        {},
        {
            f"{D}{kind}_spans.{i}.{arm}.sequence_id": "$unrecorded_id"
            for kind in ("model_input", "loss_fn_input")
            for i, arm in enumerate(("prompt_tokens", "sampled_tokens"))
        },
        "record_stability_info",
    ),
    refused(
        "proto PromptProvenanceSpan.sequence_id & PromptProvenanceSpan.sequence_id"
        " & proto ProvenanceSpan.prompt_tokens",
        stable_reinforce,
        {D + "model_input_spans.0.prompt_tokens.sequence_id": "nobody:sample:0:0:0"},
        "model_input_spans[0].sequence_id",
        "nobody",
    ),
    *(
        refused(
            f"proto {message}.{field} & {message}.{field}",
            stable_reinforce,
            {f"{D}loss_fn_input_spans.{i}.{arm}.{field}": value},
            f"loss_fn_input_spans{where}",
        )
        for i, (message, arm) in enumerate(
            (("PromptProvenanceSpan", "prompt_tokens"), ("SampledProvenanceSpan", "sampled_tokens"))
        )
        for field, value, where in (("offset", 7, f"[{i}]"), ("length", 7, ": cover"))
    ),
    *(
        refused(
            f"proto {message}.{field}", spanned, {f"{D}model_input_spans.{i}.{arm}.{field}": value}, "model_input_spans"
        )
        for i, (message, arm) in enumerate(
            (("PromptProvenanceSpan", "prompt_tokens"), ("SampledProvenanceSpan", "sampled_tokens"))
        )
        for field, value in (("offset", -1), ("length", 7), ("sequence_id", ""))
    ),
)

OLD_FORM: tuple[Check, ...] = (
    refused("ForwardBackwardRequest.model_id", json_forward_backward, {"model_id": "nobody:train:0"}),
    refused("ForwardBackwardRequest.seq_id", json_forward_backward, {"seq_id": 0}),
    refused(f"ForwardBackwardRequest.{J}", json_forward_backward, {J: ABSENT}),
    refused("ForwardRequest.model_id", json_forward, {"model_id": "nobody:train:0"}),
    refused("ForwardRequest.seq_id", json_forward, {"seq_id": 0}),
    refused(f"ForwardRequest.{F}", json_forward, {F: ABSENT}),
    refused("ForwardBackwardInput.data", json_forward_backward, {f"{J}.data": []}),
    differs("ForwardBackwardInput.data", json_forward, {f"{F}.data.0.model_input.chunks.0.tokens": SHIFTED}, {}),
    differs("ForwardBackwardInput.loss_fn", json_forward_backward, {f"{J}.loss_fn": "importance_sampling"}, {}),
    differs("ForwardBackwardInput.loss_fn", json_forward, {f"{F}.loss_fn": "importance_sampling"}, {}),
    differs(
        "ForwardBackwardInput.loss_fn_config",
        json_forward_backward,
        {f"{J}.loss_fn_config": {"clip_high_threshold": 2.0}},
        {},
    ),
    differs("Datum.model_input", json_forward_backward, {f"{J}.data.0.model_input.chunks.0.tokens": SHIFTED}, {}),
    differs(
        "Datum.loss_fn_inputs & TensorData.data",
        json_forward_backward,
        {f"{J}.data.0.loss_fn_inputs.advantages.data": [0.5] * N},
        {},
    ),
    refused("Datum.model_input_spans", json_forward_backward, {f"{J}.data.0.model_input_spans": []}),
    refused("Datum.loss_fn_input_spans", json_forward_backward, {f"{J}.data.0.loss_fn_input_spans": []}),
    refused("TensorData.dtype", json_forward_backward, {f"{J}.data.0.loss_fn_inputs.advantages.dtype": "int32"}),
    refused(
        "TensorData.shape", json_forward_backward, {f"{J}.data.0.loss_fn_inputs.advantages.shape": [9]}, "advantages"
    ),
    differs(
        "TensorData.sparse_crow_indices",
        json_sparse,
        {
            f"{J}.data.0.loss_fn_inputs.weights.sparse_crow_indices": [0, 2, 2, 3, 4],
            f"{J}.data.0.loss_fn_inputs.weights.sparse_col_indices": [0, 1, 0, 0],
        },
        {f"{J}.data.0.loss_fn_inputs.weights.sparse_col_indices": [0, 1, 0, 0]},
    ),
    differs(
        "TensorData.sparse_col_indices",
        json_sparse,
        {f"{J}.data.0.loss_fn_inputs.weights.sparse_col_indices": [1, 0, 0, 1]},
        {},
    ),
    refused(
        "EncodedTextChunk.type", json_forward_backward, {f"{J}.data.0.model_input.chunks.0.type": "image"}, "chunks[0]"
    ),
)

G = "graph.nodes."
CUSTOM: tuple[Check, ...] = (
    refused("CreateCustomLossRequest.session_id", custom, {"session_id": "nobody"}),
    refused("CreateCustomLossRequest.custom_loss_seq_id", custom, {"custom_loss_seq_id": -1}),
    refused("CreateCustomLossRequest.name", custom, {"name": "yours", "inputs.1.rank": 2}, "'scale'", "'yours'"),
    refused("CreateCustomLossRequest.inputs", custom, {"inputs": []}),
    refused("CustomLossInput.name", custom, {"inputs.1.name": "weight"}, "graph.nodes[1]"),
    refused(
        "CustomLossInput.name", custom, {"inputs.1.name": "advantages", G + "1.target": "advantages"}, "'advantages'"
    ),
    refused("CustomLossInput.rank", custom, {"inputs.1.rank": 2}, "'scale'", "rank 2"),
    refused("CreateCustomLossRequest.graph & CustomLossGraph.nodes", custom, {"graph.nodes": []}, "graph.nodes"),
    refused("CustomLossGraph.format", custom, {"graph.format": 2}, "graph.format"),
    refused("CustomLossNode.op", custom, {G + "2.op": "call_module"}, "graph.nodes[2]", ".op"),
    refused("CustomLossNode.name", custom, {G + "2.name": "twice"}, "graph.nodes[3]", "scaled"),
    differs("CustomLossNode.target", custom, {G + "2.target": "operator.add"}, {}),
    refused("CustomLossNode.target", custom, {G + "2.target": "os.system"}, "graph.nodes[2]", "os.system"),
    differs("CustomLossNode.args", custom, {G + "2.args": [{"ref": "logprobs"}, 3.0]}, {}),
    refused("CustomLossNode.kwargs", custom, {G + "3.kwargs": {"dim": 5}}, "total"),
    refused("CreateCustomLossRequest.type", custom, {"type": "custom"}),
)

TRAINING = (*RUNS, *STEPS, *PASSES, *SPANS, *OLD_FORM, *CUSTOM)
