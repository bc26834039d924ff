"""The API described for programs (OpenAPI 3.1), from the table of endpoints and the shared types; a page for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tinsmith._version import __version__
from tinsmith.server.endpoints import ENDPOINTS
from tinsmith.server.routes._call import JSON, PROTOBUF, Endpoint, plain_refusal
from tinsmith.types._model import Model
from tinsmith.types.schema import json_schema

_DETAIL = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
"""As OpenAI's API has it."""
_BINARY = {"schema": {"type": "string", "format": "binary"}}


def document(endpoints: Sequence[Endpoint] = ENDPOINTS) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tinsmith", "version": __version__, "description": "The Tinker training API."},
        "security": [{"key": []}, {"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {**_schemas(endpoints), "Detail": _DETAIL, "Error": _ERROR},
            "securitySchemes": {
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _schemas(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The shared types, and those that only endpoints of this server take."""
    found: dict[str, Any] = json_schema()["$defs"]

    def define(cls: Any) -> dict[str, Any]:
        if cls.__name__ not in found:
            found[cls.__name__] = {}
            found[cls.__name__] = cls.json_schema(define)
        return {"$ref": f"#/$defs/{cls.__name__}"}

    for endpoint in endpoints:
        if endpoint.takes is not None:
            define(endpoint.takes)
    return {name: _relocated(schema) for name, schema in found.items()}


def _relocated(value: Any) -> Any:
    """The same schema, its references pointing to where OpenAPI keeps them."""
    if isinstance(value, dict):
        return {key: _relocated(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_relocated(item) for item in value]
    if isinstance(value, str) and value.startswith("#/$defs/"):
        return value.replace("#/$defs/", "#/components/schemas/")
    return value


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.answer.__name__,
        "summary": (endpoint.answer.__doc__ or "").strip(),
        "tags": [endpoint.answer.__module__.rpartition(".")[2]],
        "responses": {"default": {"description": "Refused.", "content": {JSON: {"schema": _refused(endpoint)}}}},
    }
    status = "200" if endpoint.gives or endpoint.gives_protobuf else "2XX"
    operation["responses"][status] = {"description": "Done.", **_content(endpoint.gives, endpoint.gives_protobuf)}
    if parameters := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [_path_parameter(name) for name in parameters]
    if endpoint.takes:
        operation["requestBody"] = {"required": True, **_content(endpoint.takes, endpoint.takes_protobuf)}
    if endpoint.is_open:
        operation["security"] = []
    return operation


def _content(model: type[Model] | None, protobuf: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if model is not None:
        content[JSON] = {"schema": _reference(model.__name__)}
    elif protobuf:  # the result of whatever operation was asked for
        content[JSON] = {"schema": {"type": "object"}}
    if protobuf:
        content[PROTOBUF] = _BINARY
    return {"content": content} if content else {}


def _refused(endpoint: Endpoint) -> dict[str, str]:
    return _reference("Detail" if endpoint.refusal is plain_refusal else "Error")


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Tinsmith API</title>
<style>
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
 summary { cursor: pointer; padding: .3rem 0; } summary b { display: inline-block; width: 4.5rem; }
 code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
 pre { overflow: auto; background: #8881; padding: 1rem; }
 h2 { margin: 1.5rem 0 .5rem; text-transform: capitalize; }
 :root { color-scheme: light dark; }
</style>
<h1>Tinsmith API</h1>
<p>Send your key as <code>X-API-Key</code>. The same, for programs: <a href="openapi.json">openapi.json</a>.</p>
<main>Loading...</main>
<script type="module">
 const api = await (await fetch("openapi.json")).json();
 const main = document.querySelector("main"); main.textContent = "";
 const add = (parent, tag, text = "") =>
  parent.appendChild(Object.assign(document.createElement(tag), { textContent: text }));
 const groups = {};
 for (const [path, methods] of Object.entries(api.paths))
  for (const [method, operation] of Object.entries(methods))
   (groups[operation.tags[0]] ??= []).push([method.toUpperCase(), path, operation]);
 const shown = (content = {}) => Object.entries(content).map(([type, { schema }]) => {
  const name = schema.$ref?.split("/").pop();
  return type + (name ? " " + name + "\\n" + JSON.stringify(api.components.schemas[name], null, 1) : "");
 }).join("\\n\\n");
 for (const [group, operations] of Object.entries(groups)) {
  add(main, "h2", group);
  for (const [method, path, operation] of operations) {
   const details = add(main, "details"), summary = add(details, "summary");
   add(summary, "b", method); add(summary, "code", path);
   add(details, "p", operation.summary);
   if (operation.requestBody) add(details, "pre", "request: " + shown(operation.requestBody.content));
   for (const [status, { content }] of Object.entries(operation.responses))
    if (content && status !== "default") add(details, "pre", status + ": " + shown(content));
  }
 }
</script>
"""
