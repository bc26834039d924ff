"""Links into the web console of the hosted service."""

from __future__ import annotations

CONSOLE = "https://tinker.thinkingmachines.ai"


def sessions_url() -> str:
    return f"{CONSOLE}/sessions"


def session_url(session_id: str) -> str:
    return f"{CONSOLE}/sessions/{session_id}"


def training_run_url(training_run_id: str) -> str:
    return f"{CONSOLE}/training_runs/{training_run_id}"
