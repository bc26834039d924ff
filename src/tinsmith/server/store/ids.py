"""How ids are formed: from the numbers that a client counts, so that a repeated request meets its first."""

from __future__ import annotations


def model_id(session_id: str, model_seq_id: int) -> str:
    """Also the id of the training run."""
    return f"{session_id}:train:{model_seq_id}"


def sampler_id(session_id: str, sampling_session_seq_id: int) -> str:
    """Also the id of the sampling session."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def loss_id(session_id: str, custom_loss_seq_id: int) -> str:
    return f"{session_id}:loss:{custom_loss_seq_id}"


def request_id(stream: str, seq_id: int) -> str:
    return f"{stream}:{seq_id}"


def tinker_path(run_id: str, kind: str, name: str) -> str:
    """`kind` as in the path: `weights`, `sampler_weights` or `external_weights`."""
    return f"tinker://{run_id}/{kind}/{name}"


def stream_of(request_id: str) -> str:
    """The model, sampling session or list of a session that numbered the request."""
    return request_id.rpartition(":")[0]
