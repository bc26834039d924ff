"""How the client behaves when the server does not: delays, poll rates, silences, and requests nobody asked for.

Most of these are waits, not work, so one run each is enough. What may go on for minutes is watched for `WATCHED`
seconds.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import harness
from harness import OFFICIAL, OURS, Numbers, Peer, Row, both

WATCHED = 15.0
RETRY_AFTER = 3
DETAIL = {"detail": "made to fail"}


# What the client does


def measure(sdk: ModuleType, action: str, url: str) -> Any:
    actions: dict[str, Callable[[ModuleType, str], Any]] = {
        "fail": seconds_to_the_error,
        "poll": poll_in_vain,
        "sample": sample_once,
        "knock": knock_at_a_closed_door,
        "start": start_training,
        "look": look_around,
    }
    return actions[action](sdk, url)


def trainer(sdk: ModuleType, url: str) -> Any:
    return harness.service(sdk, url).create_lora_training_client("tiny/model-1", rank=8).result()


def start_training(sdk: ModuleType, url: str) -> None:
    trainer(sdk, url)


def look_around(sdk: ModuleType, url: str) -> None:
    sdk.RestClient(base_url=url, api_key=harness.KEY).list_training_runs().result()


def seconds_to_the_error(sdk: ModuleType, url: str) -> float:
    """From a call that the server refuses to the exception in the caller's hands."""
    client = trainer(sdk, url)
    tokens = sdk.types.ModelInput.from_ints([1, 2, 3])
    datum = sdk.types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
    start = time.perf_counter()
    try:
        client.forward_backward([datum], "cross_entropy").result()
    except sdk.BadRequestError:
        return time.perf_counter() - start
    raise AssertionError("the server's refusal was lost")


def poll_in_vain(sdk: ModuleType, url: str) -> None:
    future = trainer(sdk, url).optim_step(sdk.types.AdamParams(learning_rate=1e-4))
    try:
        future.result(timeout=WATCHED)
    except TimeoutError:
        return
    raise AssertionError("there should have been no result")


def sample_once(sdk: ModuleType, url: str) -> None:
    client = harness.service(sdk, url).create_sampling_client(base_model="tiny/model-1").result()
    client.sample(sdk.types.ModelInput.from_ints([1, 2, 3]), 1, sdk.types.SamplingParams(max_tokens=1)).result()


def knock_at_a_closed_door(sdk: ModuleType, url: str) -> Numbers:
    """When a client of a server that is not there first says so, and how long its constructor takes."""
    seen = FirstWarning()
    logging.getLogger().addHandler(seen)
    start = time.perf_counter()
    constructed: list[float] = []

    def use() -> None:
        client = sdk.RestClient(base_url=url, api_key=harness.KEY)
        constructed.append(time.perf_counter() - start)
        client.list_training_runs().result()

    threading.Thread(target=use, daemon=True).start()
    seen.event.wait(WATCHED)
    now = time.perf_counter() - start
    return {"warning": now, "constructor": constructed[0] if constructed else now}


class FirstWarning(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


# What the server does, and what it sees


def delay_of_errors(peer: Peer, *telemetry: Any) -> float:
    """In milliseconds; the best of several tries, but for the official package, where one takes half a minute."""
    return 1e3 * min(_delay_of_error(peer, *telemetry) for _ in range(1 if peer is OFFICIAL else 5))


def _delay_of_error(peer: Peer, *telemetry: Any) -> float:
    from tests.support.server import FOREVER, FakeServer, Reply

    with FakeServer() as server:
        server.script("forward_backward", Reply(400, json=DETAIL), times=FOREVER)
        if telemetry:
            server.script("telemetry", *telemetry, times=FOREVER)
        return float(harness.measured(peer, action="fail", url=server.url))


def poll_storm(peer: Peer, status: int) -> Numbers:
    """Polls of one future per second, and telemetry events that tell of them."""
    from tests.support.server import FOREVER, FakeServer, Reply

    def is_step(request: Any) -> bool:
        return bool(request.headers.get("x-tinker-request-type") == "OptimStep")

    with FakeServer() as server:
        server.script(is_step, Reply(status, json=DETAIL), times=FOREVER)
        harness.measured(peer, action="poll", url=server.url)
        events = [event for request in server.received("telemetry") for event in request.json()["events"]]
        failures = [event for event in events if event["event"] == "GENERIC_EVENT"]
        return {"polls": len(server.received(is_step)) / WATCHED, "events": len(failures)}


def gap_after_429(peer: Peer) -> float:
    """The shortest pause between tries of a sample that the server asked to come again in `RETRY_AFTER` seconds."""
    from tests.support.server import FakeServer, Reply

    refusal = Reply(429, json=DETAIL, headers={"retry-after": str(RETRY_AFTER)})
    with FakeServer() as server:
        server.script("asample", refusal, times=2)
        harness.measured(peer, action="sample", url=server.url)
        arrivals = [request.arrived for request in server.received("asample")]
    return min(later - earlier for earlier, later in pairwise(arrivals))


def requests_before(peer: Peer, action: str, useful: str) -> int:
    from tests.support.server import FakeServer

    with FakeServer() as server:
        harness.measured(peer, action=action, url=server.url)
        return server.paths().index(f"/api/v1/{useful}")


def behind_a_closed_door(peer: Peer) -> Numbers:
    with socket.create_server(("127.0.0.1", 0)) as door:
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
    return dict(harness.measured(peer, action="knock", url=url))


def conduct() -> None:
    from tests.support.server import Hang, Reply

    up, failing, hanging = (
        [delay_of_errors(peer, *steps) for peer in (OFFICIAL, OURS)] for steps in ((), (Reply(503),), (Hang(),))
    )
    added = max(failing[1], hanging[1]) - up[1]
    closed = [behind_a_closed_door(peer) for peer in (OFFICIAL, OURS)]
    warning, constructor = ([each[name] for each in closed] for name in ("warning", "constructor"))
    storms = {status: [poll_storm(peer, status) for peer in (OFFICIAL, OURS)] for status in (503, 408)}
    gaps = [gap_after_429(peer) for peer in (OFFICIAL, OURS)]
    train, look = (
        [requests_before(peer, *what) for peer in (OFFICIAL, OURS)]
        for what in (("start", "create_model"), ("look", "training_runs"))
    )
    rows = [
        Row("a 400 reaches the caller, telemetry up (ms)", up),
        Row("the same, telemetry answers 503 (ms)", failing, "10 more", added <= 10),
        Row("the same, telemetry hangs (ms)", hanging, "10 more", added <= 10),
        Row(f"closed port: first warning, at most {WATCHED:g} s watched (s)", warning, "2", warning[1] <= 2),
        Row("closed port: constructor of RestClient (s)", constructor, "no I/O", constructor[1] < 0.5, 3),
    ]
    for status, (theirs, ours) in storms.items():
        polls, events = (both(theirs, ours, name) for name in ("polls", "events"))
        rows += [
            Row(f"polls of one future answered {status} (per s)", polls, "2", polls[1] <= 2),
            Row(f"telemetry events about them in {WATCHED:g} s, {status}", events, "10", events[1] <= 10, 0),
        ]
    within = abs(gaps[1] - RETRY_AFTER) <= 0.1 * RETRY_AFTER
    rows += [
        Row(
            f"pause of a sample after 429 with Retry-After: {RETRY_AFTER} (s)", gaps, f"{RETRY_AFTER}, 10 %", within, 2
        ),
        Row("requests before create_model", train, "1", train[1] <= 1, 0),
        Row("requests before the first REST call", look, "1", look[1] <= 1, 0),
    ]
    harness.print_table(rows)


if __name__ == "__main__":
    harness.play(conduct, measure)
