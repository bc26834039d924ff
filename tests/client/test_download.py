"""Files of an export arrive whole or not at all, go on where they stopped, and never land elsewhere."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Recorded, Reply
from tinsmith.client.config import Config
from tinsmith.client.download import NOTE
from tinsmith.errors import InvalidInputError

CONTENT = bytes(range(256)) * 256
FILES = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": CONTENT, "sub/empty.txt": b""}
MODEL = "adapter_model.safetensors"


class Setting:
    def __init__(self, server: FakeServer, tmp_path: Path) -> None:
        server.api.external_files.clear()
        server.api.external_files.update(FILES)
        self.server = server
        config = Config(base_url=server.url, api_key="tml-x", telemetry=False, retry_budget=5.0)
        self.service = tinsmith.ServiceClient(config=config)
        self.trainer = self.service.create_lora_training_client("tiny/model-1", rank=8)
        self.path = self.trainer.save_weights_external("export").result(10).path
        self.folder = tmp_path / "out"
        self.rest = self.service.rest

    def download(self, **arguments: Any) -> list[Path]:
        return self.rest.download_external_weights(self.path, self.folder, **arguments).result(20)

    def fetched(self, name: str = MODEL) -> list[Recorded]:
        return self.server.received(name)

    def contents(self) -> dict[str, bytes]:
        """Every file in the folder, the note aside."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name != NOTE]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with FakeServer() as server:
        yield Setting(server, tmp_path)


def cut_after(size: int) -> HalfBody:
    return HalfBody(CONTENT[:size], announced=len(CONTENT))


# The good case


def test_all_files_arrive_and_are_returned(setting: Setting) -> None:
    paths = setting.download()
    assert paths == [setting.folder / name for name in sorted(FILES)]
    assert setting.contents() == FILES
    assert all("x-api-key" not in request.headers for request in setting.server.received(MODEL))


def test_the_asynchronous_twin_does_the_same(setting: Setting) -> None:
    asyncio.run(setting.rest.download_external_weights_async(setting.path, str(setting.folder)))
    assert setting.contents() == FILES


def test_progress_is_told_for_every_piece_and_off_the_loop(setting: Setting) -> None:
    told: list[tuple[tinsmith.Progress, bool]] = []

    def on_progress(progress: tinsmith.Progress) -> None:
        told.append((progress, setting.rest._connection.loop.is_current_thread()))

    setting.download(on_progress=on_progress)
    assert not any(on_loop for _, on_loop in told)
    of_model = [progress for progress, _ in told if progress.file == MODEL]
    assert of_model[-1] == tinsmith.Progress(MODEL, len(CONTENT), len(CONTENT), 1, 3)
    assert [progress.file_bytes for progress in of_model] == sorted(progress.file_bytes for progress in of_model)


def test_an_error_in_the_callback_reaches_the_caller(setting: Setting) -> None:
    def on_progress(progress: tinsmith.Progress) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        setting.download(on_progress=on_progress)


# Interruptions


@pytest.mark.parametrize("fault", [Drop(), Reply(503, body=b"slow down"), cut_after(0)], ids=repr)
def test_a_file_that_could_not_be_begun_is_tried_again(setting: Setting, fault: Any) -> None:
    setting.server.script(MODEL, fault)
    setting.download()
    assert setting.contents() == FILES


def test_a_cut_connection_goes_on_where_it_stopped(setting: Setting) -> None:
    setting.server.script(MODEL, cut_after(10_000))
    setting.download()
    assert setting.contents() == FILES
    assert [request.headers.get("range") for request in setting.fetched()] == [None, "bytes=10000-"]


def test_a_call_after_a_failure_goes_on_where_the_last_one_stopped(setting: Setting) -> None:
    setting.server.script(MODEL, cut_after(30_000), Reply(404, body=b"gone"))
    with pytest.raises(tinsmith.NotFoundError):
        setting.download()
    assert set(setting.contents()) == {"adapter_config.json", f"{MODEL}.part"}, "an unfinished file has its own name"
    setting.download()
    assert setting.contents() == FILES
    assert setting.fetched()[-1].headers["range"] == "bytes=30000-"
    assert len(setting.fetched("adapter_config.json")) == 1, "what is whole is not fetched again"


def test_a_server_that_sends_the_whole_file_again_is_understood(setting: Setting) -> None:
    setting.server.script(MODEL, cut_after(10_000), Reply(200, body=CONTENT))
    setting.download()
    assert setting.contents() == FILES


def test_a_server_that_goes_on_at_another_place_is_not_trusted(setting: Setting) -> None:
    headers = {"content-range": f"bytes 20000-{len(CONTENT) - 1}/{len(CONTENT)}"}
    setting.server.script(MODEL, cut_after(10_000), Reply(206, body=CONTENT[20_000:], headers=headers))
    setting.download()
    assert setting.contents() == FILES


def test_a_part_that_is_longer_than_the_file_is_thrown_away(setting: Setting) -> None:
    setting.server.script(MODEL, cut_after(30_000), Reply(404, body=b"gone"))
    with pytest.raises(tinsmith.NotFoundError):
        setting.download()
    (setting.folder / f"{MODEL}.part").write_bytes(b"x" * (len(CONTENT) + 5))
    setting.download()
    assert setting.contents() == FILES


def test_a_part_that_was_whole_is_taken_as_it_is(setting: Setting) -> None:
    setting.server.script(MODEL, cut_after(30_000), Reply(404, body=b"gone"))
    with pytest.raises(tinsmith.NotFoundError):
        setting.download()
    (setting.folder / f"{MODEL}.part").write_bytes(CONTENT)
    setting.download()
    assert setting.contents() == FILES
    assert len(setting.fetched()) == 3


def test_a_download_that_never_succeeds_ends_within_the_budget(setting: Setting) -> None:
    config = Config(base_url=setting.server.url, api_key="tml-x", telemetry=False, retry_budget=0.5)
    rest = tinsmith.RestClient(config=config)
    setting.server.script(MODEL, Drop(), times=FOREVER)
    with pytest.raises(tinsmith.APIConnectionError):
        rest.download_external_weights(setting.path, setting.folder).result(20)


def test_a_cancelled_download_leaves_no_file_that_looks_whole(setting: Setting) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def on_progress(progress: tinsmith.Progress) -> None:
        if progress.file == MODEL:
            begun.set()
            go_on.wait(10)

    download = setting.rest.download_external_weights(setting.path, setting.folder, on_progress)
    assert begun.wait(10)
    download.cancel()
    go_on.set()
    assert MODEL not in setting.contents()
    setting.download()
    assert setting.contents() == FILES


# Links


def urls(setting: Setting, expires_in: float, **changed: str | None) -> Reply:
    folder = setting.path.removeprefix("tinker://").replace("external_weights/", "")
    signed = {name: f"{setting.server.url}/files/{folder}/{name}" for name in FILES} | changed
    expires = datetime.now(UTC) + timedelta(seconds=expires_in)
    links = {name: url for name, url in signed.items() if url is not None}
    return Reply(json={"urls": links, "expires": expires.isoformat()})


def test_links_about_to_expire_are_renewed(setting: Setting) -> None:
    setting.server.script("external_weights_urls", urls(setting, expires_in=299))
    setting.download()
    assert len(setting.server.received("external_weights_urls")) == 2
    assert setting.contents() == FILES


def test_good_links_are_used_for_all_files(setting: Setting) -> None:
    setting.download()
    assert len(setting.server.received("external_weights_urls")) == 1


def test_a_link_that_expired_early_is_renewed_once(setting: Setting) -> None:
    setting.server.script(MODEL, Reply(403, body=b"<Error><Code>AccessDenied</Code></Error>"))
    setting.download()
    assert setting.contents() == FILES
    assert len(setting.server.received("external_weights_urls")) == 2


def test_links_that_are_never_good_are_an_error(setting: Setting) -> None:
    setting.server.script(MODEL, Reply(403, body=b"AccessDenied"), times=FOREVER)
    with pytest.raises(tinsmith.PermissionDeniedError):
        setting.download()
    assert len(setting.fetched()) == 2


def test_a_file_that_vanished_from_the_list_is_an_error(setting: Setting) -> None:
    expiring = urls(setting, expires_in=1)
    setting.server.script("external_weights_urls", expiring, urls(setting, 3600, **{"adapter_config.json": None}))
    with pytest.raises(tinsmith.APIResponseValidationError, match="no longer lists"):
        setting.download()


# Names and folders


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "..", "", ".", "a\\..\\evil", "a\0b"])
def test_a_name_that_leads_elsewhere_stops_everything(setting: Setting, name: str, tmp_path: Path) -> None:
    setting.server.script("external_weights_urls", urls(setting, 3600, **{name: f"{setting.server.url}/files/x/y/z"}))
    with pytest.raises(InvalidInputError, match="outside the folder"):
        setting.download()
    assert list(tmp_path.rglob("*")) == []


def test_files_of_two_checkpoints_are_never_mixed(setting: Setting) -> None:
    setting.download()
    other = setting.trainer.save_weights_external("other").result(10).path
    with pytest.raises(InvalidInputError, match="Choose another folder"):
        setting.rest.download_external_weights(other, setting.folder).result(20)


def test_a_folder_with_files_of_unknown_origin_is_left_alone(setting: Setting) -> None:
    setting.folder.mkdir()
    (setting.folder / MODEL).write_bytes(b"precious")
    with pytest.raises(InvalidInputError, match="unknown origin"):
        setting.download()
    assert setting.contents() == {MODEL: b"precious"}


def test_other_files_in_the_folder_do_not_matter(setting: Setting) -> None:
    setting.folder.mkdir()
    (setting.folder / "notes.txt").write_text("mine")
    setting.download()
    assert setting.contents() == {**FILES, "notes.txt": b"mine"}


# Training checkpoints


def test_a_training_checkpoint_is_exported_for_the_download_and_the_export_deleted(setting: Setting) -> None:
    path = setting.trainer.save_state("a").result(10).path
    setting.service.download_checkpoint(path, setting.folder)
    assert setting.contents() == FILES
    (exported,) = [request.json() for request in setting.server.received("save_weights_external")][1:]
    assert exported["ttl_seconds"] == 3600
    (deleted,) = [request for request in setting.server.requests if request.method == "DELETE"]
    assert deleted.path.endswith("external_weights/download")
    setting.service.download_checkpoint(path, setting.folder)


def test_the_next_export_does_not_go_on_with_bytes_of_the_last_one(setting: Setting) -> None:
    path = setting.trainer.save_state("a").result(10).path
    setting.server.script(MODEL, cut_after(30_000), Reply(404, body=b"gone"))
    with pytest.raises(tinsmith.NotFoundError):
        setting.service.download_checkpoint(path, setting.folder)
    asyncio.run(setting.service.download_checkpoint_async(path, setting.folder))
    assert setting.contents() == FILES
    assert "range" not in setting.fetched()[-1].headers


def test_an_export_that_cannot_be_deleted_does_not_spoil_the_download(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    path = setting.trainer.save_state("a").result(10).path
    setting.server.script(lambda request: request.method == "DELETE", Reply(403, json={"detail": "no"}))
    setting.service.download_checkpoint(path, setting.folder)
    assert setting.contents() == FILES
    assert "expires in an hour" in caplog.text


def test_sampler_weights_are_refused_with_what_to_do(setting: Setting) -> None:
    path = setting.trainer.save_weights_for_sampler("a").result(10).path
    with pytest.raises(InvalidInputError, match="Download a training checkpoint"):
        setting.service.download_checkpoint(path, setting.folder)


def test_an_export_can_be_downloaded_by_the_service_client(setting: Setting) -> None:
    assert setting.service.download_checkpoint(setting.path, setting.folder)
    assert setting.contents() == FILES
