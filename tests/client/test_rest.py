"""The REST client: what each call sends, what it returns, and what it refuses."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import tinsmith
from tests.support.server import FOREVER, Drop, FakeServer, Reply
from tinsmith import types
from tinsmith.client import rest as rest_module
from tinsmith.client.config import Config
from tinsmith.errors import InvalidInputError


class Setting:
    """A server with a run and one checkpoint of every kind."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        quiet = Config(base_url=server.url, api_key="tml-x", telemetry=False)
        self.service = tinsmith.ServiceClient(config=msgspec.structs.replace(quiet, project_id="p-1"))
        self.trainer = self.service.create_lora_training_client("tiny/model-1", rank=8)
        self.run = self.trainer.model_id
        self.weights = self.trainer.save_state("a").result(10).path
        self.sampler_weights = self.trainer.save_weights_for_sampler("b").result(10).path
        self.external = self.trainer.save_weights_external("c").result(10).path
        self.rest = tinsmith.RestClient(config=quiet)

    def last(self) -> Any:
        return self.server.requests[-1]


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    with FakeServer() as server:
        yield Setting(server)


RUN = "session-0001:train:0"
PATH = f"/api/v1/training_runs/{RUN}"
WEIGHTS = f"tinker://{RUN}/weights/a"
EXTERNAL = f"tinker://{RUN}/external_weights/c"
OWNED = {"access_scope": "owned"}

Call = Callable[[tinsmith.RestClient], Any]

READS: list[tuple[str, Call, str, str, dict[str, str], type]] = [
    ("get_training_run", lambda rest: rest.get_training_run(RUN), "GET", PATH, OWNED, types.TrainingRun),
    (
        "get_training_run",
        lambda rest: rest.get_training_run(RUN, "accessible"),
        "GET",
        PATH,
        {"access_scope": "accessible"},
        types.TrainingRun,
    ),
    (
        "get_training_run_by_tinker_path",
        lambda rest: rest.get_training_run_by_tinker_path(WEIGHTS),
        "GET",
        PATH,
        OWNED,
        types.TrainingRun,
    ),
    (
        "list_training_runs",
        lambda rest: rest.list_training_runs(limit=5, offset=1, project_id="p-1"),
        "GET",
        "/api/v1/training_runs",
        {"limit": "5", "offset": "1", "access_scope": "owned", "project_id": "p-1"},
        types.TrainingRunsResponse,
    ),
    (
        "list_training_runs",
        lambda rest: rest.list_training_runs(),
        "GET",
        "/api/v1/training_runs",
        {"limit": "20", "offset": "0", "access_scope": "owned"},
        types.TrainingRunsResponse,
    ),
    (
        "list_checkpoints",
        lambda rest: rest.list_checkpoints(RUN),
        "GET",
        f"{PATH}/checkpoints",
        {},
        types.CheckpointsListResponse,
    ),
    (
        "list_user_checkpoints",
        lambda rest: rest.list_user_checkpoints(),
        "GET",
        "/api/v1/checkpoints",
        {"limit": "100", "offset": "0"},
        types.CheckpointsListResponse,
    ),
    (
        "get_weights_info_by_tinker_path",
        lambda rest: rest.get_weights_info_by_tinker_path(WEIGHTS),
        "POST",
        "/api/v1/weights_info",
        {},
        types.WeightsInfoResponse,
    ),
    (
        "get_external_weights_urls",
        lambda rest: rest.get_external_weights_urls(EXTERNAL),
        "GET",
        f"{PATH}/checkpoints/external_weights/c/external_weights_urls",
        {},
        types.ExternalWeightsUrlsResponse,
    ),
    (
        "get_session",
        lambda rest: rest.get_session("session-0001"),
        "GET",
        "/api/v1/sessions/session-0001",
        OWNED,
        types.GetSessionResponse,
    ),
    (
        "list_sessions",
        lambda rest: rest.list_sessions(),
        "GET",
        "/api/v1/sessions",
        {"limit": "20", "offset": "0", "access_scope": "owned"},
        types.ListSessionsResponse,
    ),
    ("health", lambda rest: rest.health(), "GET", "/api/v1/healthz", {}, types.HealthResponse),
]


@pytest.mark.parametrize(("name", "call", "method", "path", "query", "result"), READS)
def test_a_call_that_reads(
    setting: Setting, name: str, call: Call, method: str, path: str, query: dict[str, str], result: type
) -> None:
    assert isinstance(call(setting.rest).result(10), result)
    request = setting.last()
    assert (request.method, request.path, request.query) == (method, path, query)
    assert request.headers["x-sdk-method"] == f"RestClient.{name}"
    assert request.headers["x-sdk-version"] == "0.38.0"
    assert request.headers["x-api-key"] == "tml-x"


def test_the_asynchronous_twins_return_values(setting: Setting) -> None:
    rest = setting.rest

    async def scenario() -> None:
        assert (await rest.get_training_run_async(RUN)).training_run_id == RUN
        assert (await rest.get_training_run_by_tinker_path_async(WEIGHTS)).training_run_id == RUN
        assert len((await rest.list_training_runs_async()).training_runs) == 1
        assert len((await rest.list_checkpoints_async(RUN)).checkpoints) == 3
        assert len((await rest.list_user_checkpoints_async(limit=2)).checkpoints) == 2
        assert (await rest.get_weights_info_by_tinker_path(WEIGHTS)).lora_rank == 8
        assert (await rest.get_external_weights_urls_async(EXTERNAL)).urls
        assert (await rest.get_session_async("session-0001")).training_run_ids == [RUN]
        assert (await rest.list_sessions_async()).sessions == ["session-0001"]
        assert (await rest.health_async()).status == "ok"
        assert (await rest.export_session_trace_async("session-0001")).startswith("http")

    asyncio.run(scenario())


def test_a_sampler_is_looked_up(setting: Setting) -> None:
    client = setting.service.create_sampling_client(model_path=setting.sampler_weights)
    found = setting.rest.get_sampler(client.sampling_session_id).result(10)
    assert (found.base_model, found.model_path) == ("tiny/model-1", setting.sampler_weights)
    assert asyncio.run(setting.rest.get_sampler_async(client.sampling_session_id)) == found


def test_the_connection_of_a_service_client_can_be_used(setting: Setting) -> None:
    assert setting.service.rest.list_sessions().result(10).sessions
    with pytest.warns(FutureWarning, match="deprecated"):
        old = setting.service.create_rest_client()
    assert old.list_sessions().result(10).sessions


# Changes


def test_a_checkpoint_is_published_once_and_a_conflict_is_told_at_once(setting: Setting) -> None:
    rest, path = setting.rest, setting.weights
    rest.publish_checkpoint_from_tinker_path(path).result(10)
    request = setting.last()
    assert (request.method, request.path, request.body) == ("POST", f"{PATH}/checkpoints/weights/a/publish", b"")
    started = time.monotonic()
    with pytest.raises(tinsmith.ConflictError, match="already"):
        rest.publish_checkpoint_from_tinker_path(path).result(10)
    with pytest.raises(tinsmith.ConflictError):
        asyncio.run(rest.publish_checkpoint_from_tinker_path_async(path))
    assert time.monotonic() - started < 5
    asyncio.run(rest.unpublish_checkpoint_from_tinker_path_async(path))
    assert setting.last().method == "DELETE"
    with pytest.raises(tinsmith.ConflictError):
        rest.unpublish_checkpoint_from_tinker_path(path).result(10)


def test_a_lifetime_is_set_and_taken_away_with_an_explicit_null(setting: Setting) -> None:
    rest, path = setting.rest, setting.weights
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(10)
    request = setting.last()
    assert (request.method, request.path) == ("PUT", f"{PATH}/checkpoints/weights/a/ttl")
    assert request.json() == {"ttl_seconds": 7200}
    asyncio.run(rest.set_checkpoint_ttl_from_tinker_path_async(path, None))
    assert setting.last().body == b'{"ttl_seconds":null}'


def test_checkpoints_are_deleted_by_id_and_by_path(setting: Setting) -> None:
    rest = setting.rest
    for name in ("d1", "d2", "d3", "d4"):
        setting.trainer.save_state(name).result(10)
    rest.delete_checkpoint(RUN, "weights/d1").result(10)
    assert (setting.last().method, setting.last().path) == ("DELETE", f"{PATH}/checkpoints/weights/d1")
    rest.delete_checkpoint_from_tinker_path(f"tinker://{RUN}/weights/d2").result(10)
    asyncio.run(rest.delete_checkpoint_async(RUN, "weights/d3"))
    asyncio.run(rest.delete_checkpoint_from_tinker_path_async(f"tinker://{RUN}/weights/d4"))
    assert [found.checkpoint_id for found in rest.list_checkpoints(RUN).result(10).checkpoints] == [
        "weights/a",
        "sampler_weights/b",
        "external_weights/c",
    ]
    with pytest.raises(tinsmith.NotFoundError):
        rest.delete_checkpoint(RUN, "weights/d1").result(10)


def test_a_session_is_assigned_to_a_project(setting: Setting) -> None:
    setting.rest.assign_session_project("session-0001", "p-2").result(10)
    request = setting.last()
    assert (request.method, request.path) == ("PUT", "/api/v1/sessions/session-0001/project")
    assert request.json() == {"project_id": "p-2"}
    asyncio.run(setting.rest.assign_session_project_async("session-0001", "p-1"))


def test_weights_are_copied_once_however_often_the_request_is_repeated(setting: Setting) -> None:
    setting.server.script("copy_weights", Drop(executed=True), Reply(503, json={}))
    before = len(setting.server.received("copy_weights"))
    copied = setting.rest.copy_weights(
        setting.weights, "p-9", ttl_seconds=3600, weights_access_token="tml-other"
    ).result(10)
    requests = setting.server.received("copy_weights")[before:]
    assert len(requests) == 3
    assert len({request.headers["x-idempotency-key"] for request in requests}) == 1
    assert requests[0].headers["x-tinker-weights-access-token"] == "tml-other"
    assert requests[0].json()["source_path"] == setting.weights
    assert requests[0].json()["destination_project_id"] == "p-9"
    assert copied == "tinker://copy-0001/weights/a"


def test_weights_are_copied_into_the_project_of_the_client(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.service.copy_weights(setting.weights).result(10)
    assert setting.last().json()["destination_project_id"] == "p-1"
    with pytest.raises(InvalidInputError, match="TINKER_PROJECT_ID"):
        setting.rest.copy_weights(setting.weights)
    monkeypatch.setenv("TINKER_PROJECT_ID", "p-env")
    rest = tinsmith.RestClient(base_url=setting.server.url, api_key="tml-x")
    asyncio.run(rest.copy_weights_async(setting.weights))
    assert setting.last().json()["destination_project_id"] == "p-env"


# Listings


def test_listings_can_be_gone_through(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_module, "RUNS_PER_PAGE", 2)
    monkeypatch.setattr(rest_module, "CHECKPOINTS_PER_PAGE", 2)
    monkeypatch.setattr(rest_module, "SESSIONS_PER_PAGE", 1)
    rest = setting.rest
    for _ in range(2):
        setting.service.create_lora_training_client("tiny/model-2", rank=8).result(10)
    runs = [run.training_run_id for run in rest.iter_training_runs()]
    assert runs == [run.training_run_id for run in rest.list_training_runs().result(10).training_runs]
    assert len(runs) == 3
    checkpoints = [found.tinker_path for found in rest.iter_user_checkpoints()]
    assert checkpoints == [found.tinker_path for found in rest.list_user_checkpoints().result(10).checkpoints]

    async def scenario() -> None:
        assert [run.training_run_id async for run in rest.iter_training_runs()] == runs
        assert [session async for session in rest.iter_sessions()] == rest_sessions
        assert [found.tinker_path async for found in rest.iter_user_checkpoints()] == checkpoints

    rest_sessions = list(rest.iter_sessions())
    assert rest_sessions == ["session-0001"]
    asyncio.run(scenario())


def test_a_listing_sends_nothing_until_it_is_used(setting: Setting) -> None:
    before = len(setting.server.requests)
    setting.rest.iter_training_runs()
    setting.rest.iter_user_checkpoints()
    setting.rest.iter_sessions()
    assert len(setting.server.requests) == before


def test_searches_are_experimental_and_can_be_gone_through() -> None:
    with FakeServer() as server:
        for name in ("one", "two", "three"):
            with tinsmith.ServiceClient(base_url=server.url, api_key="tml-x", display_name=name) as service:
                service.create_sampling_client(base_model="tiny/model-1").result(10)
        rest = tinsmith.RestClient(base_url=server.url, api_key="tml-x")
        request = types.SessionSearchRequest(limit=2)
        with pytest.warns(tinsmith.ExperimentalWarning):
            page = rest.search_sessions(request).result(10)
        assert [found.display_name for found in page.sessions] == ["three", "two"]
        with pytest.warns(tinsmith.ExperimentalWarning):
            found = list(rest.iter_search_sessions(request))
        assert [each.display_name for each in found] == ["three", "two", "one"]
        with pytest.warns(tinsmith.ExperimentalWarning):
            assert asyncio.run(rest.search_sessions_async(request)) == page
        cursors = [each.json().get("cursor") for each in server.received("sessions/search")]
        assert cursors[0] is None
        assert cursors[2]["last_session_id"] == page.sessions[-1].session_id


# Traces, health, identity


def test_a_trace_is_waited_for(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_module, "TRACE_POLL_SECONDS", 0.01)
    setting.server.script("trace_export", Reply(json={"status": "pending"}), times=3)
    assert setting.rest.export_session_trace("session-0001").result(10).startswith("http")


def test_a_trace_that_fails_or_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_module, "TRACE_POLL_SECONDS", 0.01)
    with FakeServer() as server:
        rest = tinsmith.RestClient(config=Config(base_url=server.url, api_key="tml-x", progress_timeout=0.2))
        server.script("trace_export", Reply(json={"status": "failed", "error": "disk full"}))
        with pytest.raises(RuntimeError, match="disk full"):
            rest.export_session_trace("session-0001").result(10)
        server.script("trace_export", Reply(json={"status": "pending"}), times=FOREVER)
        with pytest.raises(tinsmith.NoProgressError, match="still being made"):
            rest.export_session_trace("session-0001").result(10)


def test_the_health_of_a_server_is_asked_once() -> None:
    with FakeServer() as server:
        rest = tinsmith.RestClient(base_url=server.url, api_key="tml-x")
        server.script("healthz", Reply(503, json={}), times=FOREVER)
        with pytest.raises(tinsmith.InternalServerError):
            rest.health().result(10)
        assert len(server.received("healthz")) == 1


def test_whoami_reads_the_token_and_sends_nothing_more() -> None:
    with FakeServer(flags={"pjwt_auth_enabled": True}) as server:
        me = tinsmith.RestClient(base_url=server.url, api_key="tml-x").whoami().result(10)
        assert (me.user_urn, me.org_urn) == ("tml:organization_user:u-1", "tml:organization:o-1")
        assert me.email == "dev@example.com"
        assert server.paths() == ["/api/v1/client/config", "/api/v1/auth/token"]


def test_whoami_needs_a_server_that_exchanges_keys(setting: Setting) -> None:
    with pytest.raises(RuntimeError, match="plain API keys"):
        setting.rest.whoami().result(10)


def test_what_moved_to_the_admin_client_still_works_with_a_warning(setting: Setting) -> None:
    with pytest.warns(FutureWarning, match="AdminClient"):
        assert setting.rest.get_audit_log().result(10).entries
    with pytest.warns(FutureWarning, match="AdminClient"):
        assert asyncio.run(setting.rest.get_current_checkpoint_storage_usage_async()).data
    with pytest.warns(FutureWarning, match="AdminClient"):
        setting.rest.get_billing_usage("2030-01-01T00:00:00Z", "2030-01-02T00:00:00Z").result(10)


# Refusals


NO_PATHS = ["", "weights/a", "tinker://", "tinker://run/weights", "tinker://run/other/a", "tinker:///weights/a"]
BY_PATH: list[Callable[[tinsmith.RestClient, Any], Any]] = [
    lambda rest, path: rest.get_training_run_by_tinker_path(path),
    lambda rest, path: rest.get_weights_info_by_tinker_path(path),
    lambda rest, path: rest.get_external_weights_urls(path),
    lambda rest, path: rest.download_external_weights(path, "/nonexistent"),
    lambda rest, path: rest.delete_checkpoint_from_tinker_path(path),
    lambda rest, path: rest.publish_checkpoint_from_tinker_path(path),
    lambda rest, path: rest.unpublish_checkpoint_from_tinker_path(path),
    lambda rest, path: rest.set_checkpoint_ttl_from_tinker_path(path, 7200),
    lambda rest, path: rest.copy_weights(path, "p-1"),
]


@pytest.mark.parametrize("path", [*NO_PATHS, "tinker://run/weights/", "https://host/weights/a", 5, None], ids=repr)
def test_what_is_no_checkpoint_path_is_refused_by_every_call(setting: Setting, path: Any) -> None:
    before = len(setting.server.requests)
    for call in BY_PATH:
        with pytest.raises(InvalidInputError):
            call(setting.rest, path)
    assert len(setting.server.requests) == before


@pytest.mark.parametrize("path", [WEIGHTS, f"tinker://{RUN}/sampler_weights/b"])
def test_only_exports_have_files(setting: Setting, path: str) -> None:
    with pytest.raises(InvalidInputError, match="save_weights_external"):
        setting.rest.get_external_weights_urls(path)


@pytest.mark.parametrize(
    "call",
    [
        lambda rest: rest.get_training_run(""),
        lambda rest: rest.get_training_run("../sessions"),
        lambda rest: rest.get_training_run(WEIGHTS),
        lambda rest: rest.get_training_run(5),
        lambda rest: rest.get_training_run(RUN, "everyone"),
        lambda rest: rest.list_training_runs(limit=0),
        lambda rest: rest.list_training_runs(limit="5"),
        lambda rest: rest.list_training_runs(offset=-1),
        lambda rest: rest.iter_training_runs("everyone"),
        lambda rest: rest.iter_sessions("everyone"),
        lambda rest: rest.list_checkpoints(None),
        lambda rest: rest.delete_checkpoint(RUN, "a"),
        lambda rest: rest.delete_checkpoint(RUN, "weights/../../x"),
        lambda rest: rest.delete_checkpoint("", "weights/a"),
        lambda rest: rest.set_checkpoint_ttl_from_tinker_path(WEIGHTS, 0),
        lambda rest: rest.set_checkpoint_ttl_from_tinker_path(WEIGHTS, "soon"),
        lambda rest: rest.get_session(""),
        lambda rest: rest.assign_session_project("session-0001", ""),
        lambda rest: rest.get_sampler("a/b"),
        lambda rest: rest.export_session_trace(""),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_sent(setting: Setting, call: Call) -> None:
    before = len(setting.server.requests)
    with pytest.raises(InvalidInputError):
        call(setting.rest)
    assert len(setting.server.requests) == before


def test_a_search_needs_a_request(setting: Setting) -> None:
    with pytest.warns(tinsmith.ExperimentalWarning), pytest.raises(InvalidInputError, match="SessionSearchRequest"):
        setting.rest.search_sessions({"limit": 5})  # type: ignore[arg-type]


def test_a_connection_and_settings_exclude_each_other(setting: Setting) -> None:
    with pytest.raises(InvalidInputError, match="pass one kind"):
        tinsmith.RestClient(setting.service._connection, api_key="tml-x")


def test_ids_with_unusual_characters_stay_one_part_of_the_url(setting: Setting) -> None:
    with pytest.raises(tinsmith.NotFoundError):
        setting.rest.get_training_run("a b?c#d%e:f").result(10)
    assert setting.last().path == "/api/v1/training_runs/a b?c#d%e:f"


# Trouble


def test_reads_are_repeated_when_the_server_stumbles(setting: Setting) -> None:
    setting.server.script("sessions", Reply(503, json={}, headers={"retry-after-ms": "20"}), Drop())
    assert setting.rest.list_sessions().result(10).sessions


def test_an_answer_of_the_wrong_form_is_a_typed_error(setting: Setting) -> None:
    setting.server.script("sessions", Reply(json={"wrong": 1}))
    with pytest.raises(tinsmith.APIResponseValidationError, match="ListSessionsResponse"):
        setting.rest.list_sessions().result(10)


def test_a_closed_client_says_so() -> None:
    with FakeServer() as server:
        rest = tinsmith.RestClient(base_url=server.url, api_key="tml-x")
        server.script("sessions", Reply(json={}, delay=60))
        pending = rest.list_sessions()
        server.wait_for("sessions")
        rest.close().result(10)
        with pytest.raises(tinsmith.ClientClosedError):
            pending.result(10)
        with pytest.raises(tinsmith.ClientClosedError):
            rest.list_sessions()
        assert repr(rest) == f"RestClient(base_url='{server.url}')"
        assert rest.get_telemetry() is None
