"""What the dashboard reads, and what clients log for it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.server.api.running import MODELS, Answer, RunningServer
from tests.server.api.test_tidying import Minutes
from tinsmith.server.messages import Figure, Replay
from tinsmith.server.rates import Rates
from tinsmith.server.routes._thinned import Point, thinned

ANNA = "tml-anna"
TOKENS = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
DATUM = {
    "model_input": TOKENS,
    "loss_fn_inputs": {
        "target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1, 1, 1], "dtype": "float32", "shape": [3]},
    },
}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("keyed"), api_keys=(ANNA,)) as running:
        yield running


def seen(server: RunningServer, place: str, **options: Any) -> Any:
    answer = server.call("GET", f"/dashboard/api/{place}", **options)
    assert answer.status == 200, answer
    return answer.json()


def train(server: RunningServer, model_id: str, steps: int, first: int = 1) -> None:
    """Each step has data."""
    for number in range(first, first + 2 * steps, 2):
        data = {"data": [DATUM], "loss_fn": "cross_entropy"}
        body = {"model_id": model_id, "seq_id": number, "forward_backward_input": data}
        server.result(server.post("forward_backward", body))
        server.result(server.post("optim_step", {"model_id": model_id, "seq_id": number + 1, "adam_params": {}}))


def log(server: RunningServer, model_id: str, metrics: Any, **more: Any) -> Answer:
    return server.post("log_metrics", {"model_id": model_id, "metrics": metrics, **more})


# Curves


def test_a_run_shows_its_steps_and_a_point_of_every_curve_for_each(server: RunningServer) -> None:
    model_id = server.model()
    train(server, model_id, 3)
    assert seen(server, f"runs/{model_id}/series")["names"] == [
        "loss",
        "tokens",
        "grad_norm",
        "moment",
        "step",
        "tokens_per_second",
    ]
    curve = seen(server, f"runs/{model_id}/points?name=loss")
    assert [(step, value) for step, _, value in curve["points"]] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert abs(curve["points"][0][1] - datetime.now(UTC).timestamp()) < 600
    (run,) = [one for one in seen(server, "runs")["runs"] if one["run_id"] == model_id]
    assert (run["steps"], run["last"]["loss"], run["base_model"], run["rank"]) == (3, 2.0, MODELS[0], 8)
    assert (run["corrupted"], run["is_removed"], run["session_name"]) == (None, False, None)


def test_a_cursor_gives_what_came_after_it(server: RunningServer) -> None:
    model_id = server.model()
    train(server, model_id, 2)
    cursor = seen(server, f"runs/{model_id}/points?name=loss")["cursor"]
    assert seen(server, f"runs/{model_id}/points?name=loss&after={cursor}") == {"points": [], "cursor": cursor}
    train(server, model_id, 1, first=5)
    news = seen(server, f"runs/{model_id}/points?name=loss&after={cursor}")
    assert [step for step, _, _ in news["points"]] == [2]
    assert news["cursor"] > cursor


def test_runs_come_newest_first_in_parts_with_the_names_of_their_sessions(server: RunningServer) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "1", "display_name": "<b>mine</b>"}
    session_id = server.post("create_session", body).json()["session_id"]
    made = [server.model(session_id, number) for number in range(3)]
    page = seen(server, "runs?limit=2")
    assert [run["run_id"] for run in page["runs"]] == [made[2], made[1]]
    assert page["runs"][0]["session_name"] == "<b>mine</b>"
    assert page["total"] >= 3
    assert seen(server, "runs?limit=1&offset=2")["runs"][0]["run_id"] == made[0]


def test_a_run_says_whether_it_can_go_on_and_whether_something_is_going_on(server: RunningServer) -> None:
    session_id = server.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "1"}).json()[
        "session_id"
    ]
    run_id = server.model(session_id, 0)

    def told() -> tuple[bool, bool]:
        run = seen(server, f"runs/{run_id}")
        return run["is_open"], run["is_at_work"]

    assert told() == (True, False)
    server.workers.hold("optim_step")
    step = server.post("optim_step", {"model_id": run_id, "seq_id": 1, "adam_params": {}})
    assert told() == (True, True)
    server.workers.release()
    server.result(step)
    server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    assert told() == (False, False)


@pytest.mark.parametrize(
    ("query", "field"),
    [("", "name"), ("?name=loss&max=3", "max"), ("?name=loss&max=x", "max"), ("?name=loss&after=-1", "after")],
)
def test_a_question_about_points_that_makes_no_sense_is_refused(server: RunningServer, query: str, field: str) -> None:
    refused = server.call("GET", f"/dashboard/api/runs/{server.model()}/points{query}")
    assert refused.status == 422
    assert refused.json()["detail"].startswith(f"{field} is ")


def test_a_run_alone_is_as_in_the_list(server: RunningServer) -> None:
    run_id = server.model()
    (listed,) = (run for run in seen(server, "runs?limit=100")["runs"] if run["run_id"] == run_id)
    assert seen(server, f"runs/{run_id}") == listed
    assert server.call("GET", "/dashboard/api/runs/nobody").status == 404


def test_a_curve_that_is_not_there_has_no_points(server: RunningServer) -> None:
    assert seen(server, f"runs/{server.model()}/points?name=nothing") == {"points": [], "cursor": 0}
    assert server.call("GET", "/dashboard/api/runs/nobody/series").status == 404


def test_a_long_curve_is_thinned_to_its_ends_and_extremes() -> None:
    curve: list[Point] = [(step, step + 0.5, float(step % 7)) for step in range(1000)]
    curve[500:503] = [(500, 500.5, 99.0), (501, 501.5, -99.0), (502, 502.5, None)]
    found = thinned(curve, 20)
    assert len(found) == 20
    assert found == sorted(found, key=lambda point: point[0])
    assert (found[0], found[-1]) == (curve[0], curve[-1])
    assert {curve[500], curve[501]} <= set(found)
    assert thinned(curve[:20], 20) == curve[:20]
    assert len(thinned([(step, 0.0, None) for step in range(100)], 10)) == 6


def test_curves_stay_when_the_operations_behind_them_and_the_samples_go(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with RunningServer(tmp_path_factory.mktemp("old"), result_ttl_seconds=60) as server:
        session_id = server.session()
        model_id, sampler = server.model(session_id), server.sampler(session_id)
        train(server, model_id, 2)
        server.store.jobs.forget_payloads(model_id, upto_seq=4)
        asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": TOKENS, "num_samples": 1}
        server.result(server.post("asample", {**asked, "sampling_params": {"max_tokens": 3}}))
        assert len(seen(server, "samples")["samples"]) == 1
        Minutes(server).pass_(timedelta(minutes=3))
        assert server.store.results.statuses([f"{model_id}:2"]) == {}
        points = seen(server, f"runs/{model_id}/points?name=loss")["points"]
        assert [step for step, _, _ in points] == [0, 1]
        assert seen(server, "samples")["samples"] == []


# What clients log


def test_what_a_client_logs_is_a_curve(server: RunningServer) -> None:
    model_id = server.model()
    assert log(server, model_id, {"reward": 0.5, "länge/mean": 3}, step=7).status == 204
    assert log(server, model_id, {"reward": 1.5}).status == 204
    train(server, model_id, 1)
    assert log(server, model_id, {"reward": 2.5}).status == 204
    assert {"client/reward", "client/länge/mean"} <= {*seen(server, f"runs/{model_id}/series")["names"]}
    points = seen(server, f"runs/{model_id}/points?name=client/reward")["points"]
    assert [(step, value) for step, _, value in points] == [(7, 0.5), (0, 1.5), (1, 2.5)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"metrics": {}}, "metrics has 0 numbers"),
        ({"metrics": {f"m{index}": 1 for index in range(101)}}, "metrics has 101 numbers"),
        ({"metrics": {"x" * 201: 1}}, "201 characters; take 1 to 200"),
        ({"metrics": {"": 1}}, "0 characters"),
        ({"metrics": {"a\nb": 1}}, "cannot be printed"),
        ({"metrics": {"a": "1"}}, "metrics"),
        ({"metrics": {"a": None}}, "metrics"),
        ({"metrics": [1]}, "metrics"),
        ({"metrics": {"a": 1}, "step": -1}, "step is -1"),
        ({"metrics": {"a": 1}, "step": 1.5}, "step"),
        ({"metrics": {"a": 1}, "seq_id": 0}, "seq_id is 0"),
        ({"metrics": {"a": 1}, "step": 2**63}, "step"),
        ({}, "metrics"),
    ],
)
def test_bad_metrics_are_refused_by_name(server: RunningServer, body: dict[str, Any], said: str) -> None:
    refused = server.post("log_metrics", {"model_id": server.model(), **body})
    assert refused.status == 422, refused
    assert said in refused.json()["detail"]
    assert len(refused.body) < 1200


def test_numbers_that_json_does_not_have_are_refused(server: RunningServer) -> None:
    for number in (b"NaN", b"Infinity", b"1e999"):
        body = b'{"model_id": "%s", "metrics": {"a": %s}}' % (server.model().encode(), number)
        assert server.post("log_metrics", body).status in (400, 422)


def test_a_model_has_so_many_names_and_no_more(server: RunningServer) -> None:
    model_id = server.model()
    for start in range(0, 500, 100):
        assert log(server, model_id, {f"m{number}": 1 for number in range(start, start + 100)}).status == 204
    refused = log(server, model_id, {"one more": 1})
    assert refused.status == 422
    assert "'one more'" in refused.json()["detail"]
    assert log(server, model_id, {"m1": 2}).status == 204


def test_to_log_too_much_is_refused_with_a_time_to_come_again(keyed: RunningServer) -> None:
    model_id = keyed.model(key=ANNA)
    owner = keyed.store.keys.all()[0].owner
    logged_metrics = keyed.app.state.services.logged_metrics
    logged_metrics._used.add(owner, 2 * logged_metrics._used.most)
    try:
        refused = keyed.post("log_metrics", {"model_id": model_id, "metrics": {"a": 1}}, key=ANNA)
    finally:
        logged_metrics._used.add(owner, -2 * logged_metrics._used.most)
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) > 0


# The server


def test_the_overview_tells_how_the_models_are_and_what_waits(server: RunningServer) -> None:
    model_id = server.model()
    server.workers.hold("optim_step")
    server.workers.replaying = Replay(model_id=model_id, replayed=3, total=10)
    try:
        waiting = server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
        seen_now = seen(server, "overview")
    finally:
        server.workers.replaying = None
        server.workers.release()
    assert server.result(waiting)["metrics"]
    assert [one["name"] for one in seen_now["models"]] == list(MODELS)
    assert seen_now["models"][0] == {
        "name": MODELS[0],
        "is_ready": True,
        "problem": None,
        "held_up": None,
        "workers": [
            {
                "name": "worker",
                "role": "both",
                "where": "",
                "process": 0,
                "is_ready": True,
                "problem": None,
                "samples": None,
                "held_up": None,
                "is_leaving": False,
            }
        ],
        "replay": {"replayed": 3, "total": 10},
        "train_tokens_per_second": None,
        "sample_tokens_per_second": None,
        "batch_fill": None,
        "kv_used_share": None,
    }
    (queued,) = seen_now["queue"]
    assert (queued["base_model"], queued["kind"], queued["count"]) == (MODELS[0], "optim_step", 1)
    assert queued["oldest_seconds"] >= 0
    assert (seen_now["owner"], seen_now["takes_any_key"]) == ("local", True)


def test_rates_are_what_was_counted_between_two_looks() -> None:
    clock = iter((100.0, 100.2, 102.0, 104.0, 200.0))
    rates = Rates(lambda: next(clock))

    def figures(tokens: float, batches: float) -> list[Figure]:
        return [
            Figure("tinsmith_training_tokens_total", {}, tokens),
            Figure("tinsmith_training_batches_total", {}, batches),
            Figure("tinsmith_training_batch_tokens", {}, 100.0),
            Figure("tinsmith_sampled_tokens_total", {}, 2 * tokens),
            Figure("tinsmith_kv_blocks", {"state": "used"}, 1.0),
            Figure("tinsmith_kv_blocks", {"state": "free"}, 3.0),
        ]

    assert rates.look("a", figures(0, 0)) == (None, None, None, 0.25)
    assert rates.look("a", figures(10, 1)) == (None, None, None, 0.25), "too soon to tell"
    assert rates.look("a", figures(100, 2)) == (50.0, 100.0, 0.5, 0.25)
    assert rates.look("b", figures(100, 2)) == (None, None, None, 0.25)
    assert rates.look("a", figures(100, 2)) == (None, None, None, 0.25), "the last look is too long ago"


# Samples


def test_samples_are_shown_newest_first_and_by_run(server: RunningServer) -> None:
    session_id = server.session()
    model_id = server.model(session_id)
    saved = server.result(
        server.post("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "path": "for-show"})
    )["path"]
    body = {"session_id": session_id, "sampling_session_seq_id": 1, "model_path": saved}
    of_run = server.post("create_sampling_session", body).json()["sampling_session_id"]
    for sampler in (server.sampler(session_id, 0), of_run):
        asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": TOKENS, "num_samples": 2}
        server.result(server.post("asample", {**asked, "sampling_params": {"max_tokens": 3}}))
    newest, before = seen(server, "samples")["samples"][:2]
    assert (newest["run_id"], newest["model_path"]) == (model_id, saved)
    assert (before["run_id"], before["model_path"], before["base_model"]) == (None, None, MODELS[0])
    assert newest["prompt"] == "[1, 2, 3]", "this model has no tokenizer"
    assert [one["tokens"] for one in newest["completions"]] == [3, 3]
    assert newest["completions"][0]["stop_reason"] == "length"
    assert newest["reward"] is None
    assert [one["request_id"] for one in seen(server, f"samples?run_id={model_id}")["samples"]] == [
        newest["request_id"]
    ]
    assert len(seen(server, "samples?limit=1")["samples"]) == 1
    assert server.call("GET", "/dashboard/api/samples?limit=101").status == 422


# Keys


def test_keys_are_made_shown_and_revoked_by_their_owner_alone(keyed: RunningServer) -> None:
    made = keyed.call("POST", "/dashboard/api/keys", {"name": " laptop "}, key=ANNA).json()
    assert (made["key"]["name"], made["key"]["is_current"]) == ("laptop", False)
    shown = seen(keyed, "keys", key=made["plain"])["keys"]
    assert [(one["name"], one["is_current"], one["revoked"]) for one in shown] == [
        ("configured-1", False, None),
        ("laptop", True, None),
    ]
    assert made["plain"].endswith(shown[1]["hint"])
    assert made["plain"] not in str(shown)
    other = keyed.store.keys.create("boris", "his").plain
    place = f"/dashboard/api/keys/{made['key']['key_id']}"
    assert keyed.call("DELETE", place, key=other).status == 404
    assert keyed.call("DELETE", place, key=ANNA).status == 204
    assert keyed.call("DELETE", place, key=ANNA).status == 404, "it was revoked before"
    assert keyed.call("GET", "/dashboard/api/keys", key=made["plain"]).status == 401
    assert seen(keyed, "keys", key=ANNA)["keys"][1]["revoked"] > 0
    trail = keyed.store.audit.trail(since=datetime(2000, 1, 1, tzinfo=UTC))
    done = [(one.event, one.outcome) for one in trail if one.key_id == made["key"]["key_id"]]
    assert sorted(done) == [("key_create", "done"), ("key_revoke", "done")]
    assert ("key_revoke", "refused") in {(one.event, one.outcome) for one in trail}
    (created,) = [one for one in trail if one.event == "key_create" and one.key_id == made["key"]["key_id"]]
    assert created.details == {"name": "laptop", "made_by": shown[0]["key_id"]}, "with which key it was made"


def test_two_good_keys_of_an_owner_have_two_names(keyed: RunningServer) -> None:
    first = keyed.call("POST", "/dashboard/api/keys", {"name": "desk"}, key=ANNA).json()
    refused = keyed.call("POST", "/dashboard/api/keys", {"name": " desk"}, key=ANNA)
    assert refused.status == 409
    assert refused.json()["detail"].startswith("There is a key 'desk' of this owner already")
    assert keyed.call("DELETE", f"/dashboard/api/keys/{first['key']['key_id']}", key=ANNA).status == 204
    assert keyed.call("POST", "/dashboard/api/keys", {"name": "desk"}, key=ANNA).status == 200


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, "a\x00b", 5, None])
def test_a_key_needs_a_name_that_can_be_read(keyed: RunningServer, name: object) -> None:
    refused = keyed.call("POST", "/dashboard/api/keys", {"name": name}, key=ANNA)
    assert refused.status == 422
    assert "name" in refused.json()["detail"]


def test_nobody_makes_more_keys_than_anybody_needs(tmp_path_factory: pytest.TempPathFactory) -> None:
    with RunningServer(tmp_path_factory.mktemp("many"), api_keys=(ANNA,)) as server:
        owner = server.store.keys.all()[0].owner
        for number in range(99):
            server.store.keys.create(owner, f"key {number}")
        refused = server.call("POST", "/dashboard/api/keys", {"name": "one more"}, key=ANNA)
        assert refused.status == 409
        assert "revoke one" in refused.json()["detail"]


@pytest.mark.parametrize(("method", "place"), [("GET", "keys"), ("POST", "keys"), ("DELETE", "keys/1")])
def test_a_server_without_keys_says_so(server: RunningServer, method: str, place: str) -> None:
    body = {"name": "x"} if method == "POST" else None
    refused = server.call(method, f"/dashboard/api/{place}", body)
    assert refused.status == 409
    assert "tinsmith keys create" in refused.json()["detail"]


def test_nothing_is_read_without_a_key(keyed: RunningServer) -> None:
    for place in ("overview", "runs", "samples", "keys", "runs/x/series", "runs/x/points?name=loss"):
        for key in (None, "tml-wrong"):
            assert keyed.call("GET", f"/dashboard/api/{place}", key=key).status == 401
