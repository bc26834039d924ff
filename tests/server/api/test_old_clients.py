"""Clients before 0.25 speak JSON for training: other endpoints, other bodies, other results."""

from __future__ import annotations

from typing import Any

from tests.server.api.running import RunningServer

DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [0.0, 1.0, 1.0], "dtype": "float32"},
    },
}


def work(data: list[Any], loss_fn: str = "cross_entropy") -> dict[str, Any]:
    return {"data": data, "loss_fn": loss_fn}


def test_training_in_json_gives_results_in_json(server: RunningServer) -> None:
    model_id = server.model()
    body = {"forward_backward_input": work([DATUM, DATUM]), "model_id": model_id, "seq_id": 1}
    output = server.result(server.post("forward_backward", body))
    assert output["loss_fn_output_type"] == "ArrayRecord"
    assert [len(one["logprobs"]["data"]) for one in output["loss_fn_outputs"]] == [3, 3]
    assert output["loss_fn_outputs"][0]["logprobs"]["dtype"] == "float32"
    assert output["metrics"]["loss:sum"] > 0


def test_forward_has_an_endpoint_of_its_own_and_leaves_no_gradient(server: RunningServer) -> None:
    model_id = server.model()
    forward = server.post("forward", {"forward_input": work([DATUM]), "model_id": model_id, "seq_id": 1})
    assert server.result(forward)["metrics"]["loss:sum"] > 0
    step = server.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    assert server.result(step)["metrics"]["grad_norm"] == 0


def test_bad_training_in_json_fails_its_future(server: RunningServer) -> None:
    model_id = server.model()
    bad = {"forward_backward_input": work([{"model_input": 5}]), "model_id": model_id, "seq_id": 1}
    failed = server.result(server.post("forward_backward", bad))
    assert failed["category"] == "user"
    assert "model_input" in failed["error"]


def test_a_model_is_unloaded_without_using_up_a_number(server: RunningServer) -> None:
    model_id = server.model()
    server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    unloaded = server.result(server.post("unload_model", {"model_id": model_id, "type": "unload_model"}))
    assert unloaded["model_id"] == model_id
    assert "metrics" in server.result(server.post("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}}))


def test_results_never_hold_the_key_error_unless_they_failed(server: RunningServer) -> None:
    model_id = server.model()
    answers = [
        server.result(server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})),
        server.result(server.post("save_weights", {"model_id": model_id, "seq_id": 2, "path": "a"})),
        server.post("client/config", {"sdk_version": "0.24.1"}).json(),
    ]
    assert all("error" not in answer for answer in answers)
