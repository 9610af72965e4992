"""The OpenAPI document of the service: made from one table of its paths, as its router is."""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Operation(NamedTuple):
    """One method of one path: what it is called, what it does, and its fields as (name, type, text)."""

    method: str
    path: str
    name: str
    summary: str
    fields: tuple[tuple[str, str, str], ...] = ()
    required: tuple[str, ...] = ()


_WHERE: Final = (
    ("model", "string", "The model's name."),
    ("lora_name", "string", "The LoRA adapter; empty: none."),
    ("tenant_id", "string", "The tenant; `default` when left out."),
    ("block_size", "integer", "Tokens of a block; 0: any."),
    ("cache_salt", "string", "Keeps users apart who must not share."),
)
_TOKENS: Final = (
    "token_ids",
    "array",
    "Token ids; as MessagePack also bytes of little-endian 32-bit integers.",
)
_HASHES: Final = ("seq_hashes", "array", "Chain hashes of the prompt's whole blocks, 64-bit.")
_ID: Final = ("request_id", "string", "The caller's name for the request.")

OPERATIONS: Final = (
    Operation(
        "post",
        "/register",
        "register",
        "Subscribe to an engine's event stream",
        (
            ("instance_id", "string", "The engine."),
            ("modelname", "string", "The model it serves."),
            ("block_size", "integer", "Tokens of a block."),
            ("type", "string", "vLLM, SGLang, TensorRT-LLM, Mooncake or Moonpool."),
            ("endpoint", "string", "Where it publishes, as a ZMQ endpoint."),
            ("replay_endpoint", "string", "Where it answers replays."),
            ("topic", "string", "What to subscribe to; empty: all."),
            ("tenant_id", "string", "The tenant; `default` when left out."),
            ("lora_name", "string", "The LoRA adapter of all of its blocks."),
            ("dp_rank", "integer", "The data-parallel rank; 0 when left out."),
            ("additionalsalt", "string", "The salt of all of its blocks."),
            ("hash_profile", "object", "How it hashes: strategy, algorithm, python_hash_seed."),
            ("recipe", "object", "The same in Moonpool's words: algorithm, seed, hash_seed."),
        ),
        ("instance_id", "modelname", "block_size"),
    ),
    Operation(
        "post",
        "/unregister",
        "unregister",
        "Forget an engine's streams and blocks",
        (
            ("instance_id", "string", "The engine."),
            ("tenant_id", "string", "Only of this tenant."),
            ("dp_rank", "integer", "Only of this rank."),
        ),
        ("instance_id",),
    ),
    Operation(
        "post",
        "/query",
        "query",
        "Who has the start of these tokens",
        (*_WHERE, ("instance_id", "string", "Only this engine."), _TOKENS),
        ("model", "token_ids"),
    ),
    Operation(
        "post",
        "/query_by_hash",
        "query_by_hash",
        "Who has the start of this chain of blocks",
        (*_WHERE, ("instance_id", "string", "Only this engine."), _HASHES),
        ("model", "seq_hashes"),
    ),
    Operation(
        "post",
        "/schedule",
        "schedule",
        "Choose where a request is served, and book it",
        (
            *_WHERE,
            _ID,
            _TOKENS,
            _HASHES,
            ("tokens", "integer", "How many tokens the prompt has, where token_ids is left out."),
            ("max_tokens", "integer", "The most it may answer; 0: nobody knows."),
            ("priority", "integer", "From -100 to 100; a higher one is rejected later."),
            ("explain", "boolean", "Add the cost terms of every candidate."),
        ),
        ("model", "request_id"),
    ),
    Operation(
        "post",
        "/complete",
        "complete",
        "Report on a request that was scheduled",
        (
            _ID,
            ("event", "string", "first_token, finished (the default), cancelled or refused."),
            ("cached_tokens", "integer", "What the engine found cached."),
        ),
        ("request_id",),
    ),
    Operation(
        "post",
        "/instances",
        "put_instance",
        "Add or change an instance to schedule on",
        (
            ("instance_id", "string", "The engine, as in its registration."),
            ("model", "string", "The model it serves."),
            ("url", "string", "Where requests go; given back with decisions."),
            ("role", "string", "prefill, decode or both (the default)."),
            ("dp_rank", "integer", "The data-parallel rank; 0 when left out."),
            ("block_size", "integer", "Tokens of a block, for the model's first instance."),
            ("prefill", "object", "quadratic_s and linear_s: seconds by tokens; learned where it can be."),
            ("decode", "object", "step_s, request_s, context_token_s: seconds of a step."),
            ("kv_tokens_max", "integer", "Room for prompts and answers that are decoded at once."),
            ("batch_max", "integer", "Most requests decoded at once."),
            ("chunk_tokens", "integer", "How much of a prompt one step takes; 0: all of it."),
            ("link_bytes_per_s", "integer", "Speed of its network link."),
        ),
        ("instance_id", "model"),
    ),
    Operation("get", "/instances", "list_instances", "All instances, and what is booked on each"),
    Operation("delete", "/instances/{model}/{name}", "drop_instance", "Remove an instance"),
    Operation("get", "/services", "services", "All registrations, and how their streams do"),
    Operation("get", "/global_view", "global_view", "Contexts and their members"),
    Operation("get", "/metrics", "metrics", "Counters and gauges for Prometheus"),
    Operation("get", "/healthz", "healthz", "Whether the service is up; needs no token"),
    Operation("get", "/openapi.json", "openapi", "This document"),
)


def document(version: str) -> dict[str, Any]:
    """The document as plain values."""
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Moonpool conductor",
            "version": version,
            "description": "Which engine has the start of a prompt, and which should serve it.",
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _schema((("error", "string", ""), ("reason", "string", "")), ("error",))},
        },
        "security": [{"token": []}],
        "paths": paths,
    }


def _operation(operation: Operation) -> dict[str, Any]:
    failure = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer."},
            "400": {"description": "A field is missing or wrong.", **failure},
            "401": {"description": "No token, or a wrong one.", **failure},
        },
    }
    if operation.fields:
        schema = _schema(operation.fields, operation.required)
        kinds = ("application/json", "application/msgpack")
        found["requestBody"] = {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}
    if "{" in operation.path:
        names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return found


def _schema(fields: tuple[tuple[str, str, str], ...], required: tuple[str, ...]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, kind, text in fields:
        properties[name] = {"type": kind, **({"description": text} if text else {})}
        if kind == "array":
            properties[name]["items"] = {"type": "integer"}
    return {"type": "object", "properties": properties, "required": list(required)}
