"""Checkpoints go out in the forms of other tools and come in from them: within limits, whole or not at all."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.export.making import write_random_adapter
from tests.server.api.running import MODELS, Answer, RunningServer
from tests.server.api.test_limits import until
from tests.server.tiny_models import save_model
from tests.support.tiny_tokenizer import write_folder
from tinsmith.server import embedded
from tinsmith.server.exporting import ExportArchive
from tinsmith.server.routes import _call, _download, exports

ANNA, BORIS = "tml-anna", "tml-boris"
NAMES = ("adapter_config.json", "adapter_model.safetensors")
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


class Elsewhere(NamedTuple):
    """A base model, and an adapter for it."""

    base: Path
    adapter: Path


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    root = tmp_path_factory.mktemp("elsewhere")
    base = write_folder(save_model(root / "base", "llama", vocab_size=430))
    return Elsewhere(base, write_random_adapter(root / "adapter", base))


@contextlib.contextmanager
def serving(state: Path, base: Path, **settings: Any) -> Iterator[RunningServer]:
    running = RunningServer(state, api_keys=(ANNA, BORIS), **settings)
    running.app_models = {name: replace(facts, folder=base) for name, facts in running.app_models.items()}
    with running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, elsewhere: Elsewhere) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("state"), elsewhere.base) as running:
        yield running


def packed(folder: Path, names: tuple[str, ...] = NAMES) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in names:
            archive.add(folder / name, f"somewhere/{name}")
    return data.getvalue()


def send(server: RunningServer, body: bytes, query: str = f"base_model={MODELS[0]}", **options: Any) -> Answer:
    headers = {"content-type": "application/x-tar", **options.pop("headers", {})}
    return server.post(f"import_weights?{query}", body, headers=headers, **{"key": ANNA, **options})


def imported(server: RunningServer, adapter: Path, **options: Any) -> str:
    """The path of the endpoints of a new checkpoint."""
    answer = send(server, packed(adapter), **options)
    assert answer.status == 200, answer
    _, _, run, kind, name = answer.json()["tinker_path"].split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def unpacked(answer: Answer, folder: Path) -> Path:
    assert answer.status == 200, answer
    assert int(answer.headers["content-length"]) == len(answer.body)
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as archive:
        archive.extractall(folder, filter="data")
    (inner,) = folder.iterdir()
    return inner


def left_in(server: RunningServer) -> set[str]:
    """The checkpoints that have files, when exports have cleared away what they read: a moment after they are sent."""
    root = server.config.checkpoints
    until(lambda: not any(root.glob("*/*/.*")))
    return {path.relative_to(root).as_posix() for path in root.glob("*/*/*")}


# --- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_an_export_is_of_one_checkpoint_although_another_takes_its_place(
    server: RunningServer, elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """It is read while it is sent, and its owner may not want others to see the next one."""
    place = imported(server, elsewhere.adapter)
    before = left_in(server)
    first = server.get(f"{place}/export?to={form}", key=ANNA)
    _, run, _, kind, name = place.split("/")
    folders = server.app.state.services.folders

    class Late(ExportArchive):
        def __iter__(self) -> Iterator[bytes]:
            blocks = super().__iter__()
            yield next(blocks)
            with folders.writing(f"tinker://{run}/{kind}/{name}") as folder:
                for file in NAMES:
                    shutil.copy(other / file, folder)
            yield from blocks

    other = Path(shutil.copytree(folders.folder(f"tinker://{run}/{kind}/{name}"), tmp_path / "other"))
    weights = bytearray((other / NAMES[1]).read_bytes())
    head = 8 + int.from_bytes(weights[:8], "little")
    weights[head:] = (2 * np.frombuffer(weights[head:], np.float32)).tobytes()
    (other / NAMES[1]).write_bytes(weights)
    monkeypatch.setattr(exports, "ExportArchive", Late)
    again = unpacked(server.get(f"{place}/export?to={form}", key=ANNA), tmp_path / "again")
    for file in unpacked(first, tmp_path / "first").glob("*.safetensors"):
        assert (again / file.name).read_bytes() == file.read_bytes()
    assert (folders.folder(f"tinker://{run}/{kind}/{name}") / NAMES[1]).read_bytes() == (other / NAMES[1]).read_bytes()
    assert left_in(server) == before


def test_an_export_of_what_was_withdrawn_before_it_was_read_is_refused(
    server: RunningServer, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = imported(server, elsewhere.adapter)
    before = left_in(server)
    assert server.post(f"{place}/publish", key=ANNA).status == 204
    assert server.get(f"{place}/export?to=peft", key=BORIS).status == 200
    folders = server.app.state.services.folders
    files = folders.files

    def late(path: str) -> dict[str, Path]:
        assert server.call("DELETE", f"/api/v1/{place}/publish", key=ANNA).status == 204
        found: dict[str, Path] = files(path)
        return found

    monkeypatch.setattr(folders, "files", late)
    assert server.get(f"{place}/export?to=peft", key=BORIS).status == 404
    assert left_in(server) == before


@pytest.mark.parametrize(
    ("form", "files"),
    [
        ("peft", {"README.md", *NAMES}),
        (
            "merged",
            {
                "README.md",
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "tokenizer.json",
                "tokenizer_config.json",
            },
        ),
        ("gguf", {"README.md", "model-1-imported-F32.gguf"}),
    ],
)
def test_an_export_is_a_tar_of_a_folder_named_after_the_checkpoint(
    server: RunningServer, elsewhere: Elsewhere, tmp_path: Path, form: str, files: set[str]
) -> None:
    place = imported(server, elsewhere.adapter)
    folder = unpacked(server.get(f"{place}/export?to={form}&data_note=Poems%20%3Cb%3E", key=ANNA), tmp_path)
    assert folder.name == "imported"
    assert {path.name for path in folder.iterdir()} == files
    card = (folder / "README.md").read_text()
    assert f"base model | `{MODELS[0]}`" in card
    assert "4 bits" not in card
    assert "\n## Data\n\n    Poems <b>\n" in card


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_a_base_that_was_unpacked_from_4_bits_is_told_by_the_card(
    elsewhere: Elsewhere, tmp_path: Path, form: str
) -> None:
    """As the embedded model is: what the hub has under its name differs a little."""
    base = tmp_path / "models" / "base"
    embedded.make_once(
        base, embedded._RECIPE, partial(shutil.copytree, elsewhere.base, dirs_exist_ok=True), lambda: None
    )
    with serving(tmp_path / "state", base) as server:
        place = imported(server, elsewhere.adapter)
        folder = unpacked(server.get(f"{place}/export?to={form}", key=ANNA), tmp_path / "export")
    assert f"those of `{MODELS[0]}` unpacked from 4 bits" in (folder / "README.md").read_text()


def test_what_was_imported_is_exported_again_as_it_was(
    server: RunningServer, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    place = imported(server, elsewhere.adapter)
    ours = load_file(unpacked(server.get(f"{place}/export?to=peft", key=ANNA), tmp_path) / NAMES[1])
    torch.testing.assert_close(ours, load_file(elsewhere.adapter / NAMES[1]), rtol=0, atol=0)


def test_only_what_one_may_read_can_be_exported(server: RunningServer, elsewhere: Elsewhere) -> None:
    place = imported(server, elsewhere.adapter)
    assert server.get(f"{place}/export?to=peft", key=BORIS).status == 404
    assert server.post(f"{place}/publish", key=ANNA).status == 204
    assert server.get(f"{place}/export?to=peft", key=BORIS).status == 200
    run = place.split("/")[1]
    events = [each for each in server.store.audit.trail(since=datetime(2020, 1, 1, tzinfo=UTC)) if run in str(each)]
    assert [(each.event, each.outcome) for each in reversed(events)] == [
        ("checkpoint_import", "done"),
        ("checkpoint_download", "refused"),
        ("checkpoint_publish", "done"),
        ("checkpoint_download", "done"),
    ]


@pytest.mark.parametrize(
    ("query", "complaint"),
    [("", "exported to peft, merged, gguf"), ("?to=onnx", "'onnx'"), ("?to=peft&data_note=" + 4001 * "x", "4,001")],
)
def test_what_cannot_be_made_is_said_before_anything_is_sent(
    server: RunningServer, elsewhere: Elsewhere, query: str, complaint: str
) -> None:
    answer = server.get(f"{imported(server, elsewhere.adapter)}/export{query}", key=ANNA)
    assert answer.status == 422
    assert complaint in answer.json()["detail"]


def test_a_base_or_an_adapter_that_is_gone_is_said_before_anything_is_sent(
    tmp_path: Path, elsewhere: Elsewhere
) -> None:
    base = shutil.copytree(elsewhere.base, tmp_path / "base")
    with serving(tmp_path / "state", base) as server:
        place = imported(server, elsewhere.adapter)
        (base / "model.safetensors").unlink()
        gone = server.get(f"{place}/export?to=merged", key=ANNA)
        assert (gone.status, f"{MODELS[0]} lacks model.safetensors" in gone.json()["detail"]) == (422, True)
        assert str(tmp_path) not in gone.json()["detail"]
        server.app.state.services.models.pop(MODELS[0])
        unknown = server.get(f"{place}/export?to=merged", key=ANNA)
        assert (unknown.status, MODELS[0] in unknown.json()["detail"]) == (422, True)


def test_a_damaged_or_encrypted_checkpoint_is_said_before_anything_is_sent(
    server: RunningServer, elsewhere: Elsewhere
) -> None:
    place = imported(server, elsewhere.adapter)
    (folder,) = server.config.checkpoints.glob(f"{place.split('/')[1]}/*/imported")
    weights = folder / NAMES[1]
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    damaged = server.get(f"{place}/export?to=peft", key=ANNA)
    assert (damaged.status, "is damaged on the server's disk" in damaged.json()["detail"]) == (422, True)
    for file in folder.iterdir():
        file.rename(file.with_name(f"{file.name}.age"))
    sealed = server.get(f"{place}/export?to=peft", key=ANNA)
    assert (sealed.status, "Encrypted exports" in sealed.json()["detail"]) == (422, True)


def enlarge(server: RunningServer, base: Path) -> None:
    """So that an export does not fit into what the system buffers: 64 MB of zeros at the end."""
    head = {"unused.weight": torch.zeros(16, 2**20), **load_file(base / "model.safetensors")}
    save_file(head, base / "model.safetensors", {"format": "pt"})


@contextlib.contextmanager
def begun(server: RunningServer, place: str, key: str = ANNA) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"/api/v1/{place}/export?to=merged", headers={"x-api-key": key})
    with contextlib.closing(connection), connection.getresponse() as answer:
        yield answer


def test_one_export_of_an_owner_is_made_at_a_time_and_nothing_is_left_of_one_that_is_not_read(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_download, "ASK_AGAIN_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    base = shutil.copytree(elsewhere.base, tmp_path / "base")
    with serving(tmp_path / "state", base) as server:
        enlarge(server, base)
        place = imported(server, elsewhere.adapter)
        before = left_in(server)
        services = server.app.state.services
        with begun(server, place) as first:
            assert first.status == 200
            refused = server.get(f"{place}/export?to=peft", key=ANNA)
            assert (refused.status, "is under way" in refused.json()["detail"]) == (429, True)
            server.post(f"{place}/publish", key=ANNA)
            assert server.get(f"{place}/export?to=peft", key=BORIS).status == 200, "others go on"
        until(lambda: not services.conversions._owners.amounts())
        monkeypatch.setattr(_call, "_SILENCE_SECONDS", 0.5)
        with begun(server, place) as second:
            until(lambda: not services.conversions._owners.amounts())
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                second.read()
        assert left_in(server) == before
    assert "A download was broken off: it was not read, or too slowly." in caplog.messages
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_whoever_has_read_the_last_byte_may_export_again_at_once(
    server: RunningServer, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the server may learn only later that it was sent."""
    place = imported(server, elsewhere.adapter)
    look_again = _download.Download._look_again
    free_at_the_end = []

    async def noting(download: _download.Download) -> None:
        free_at_the_end.append(not server.app.state.services.conversions._owners.amounts())
        await look_again(download)

    monkeypatch.setattr(_download.Download, "_look_again", noting)
    assert server.get(f"{place}/export?to=peft", key=ANNA).status == 200
    until(lambda: free_at_the_end[-2:] == [True, True])  # the last block, and the end
    assert not any(free_at_the_end[:-2])


def test_an_export_that_cannot_be_finished_is_broken_off_and_not_filled_up(
    tmp_path: Path, elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    base = shutil.copytree(elsewhere.base, tmp_path / "base")
    with serving(tmp_path / "state", base) as server:
        enlarge(server, base)
        place = imported(server, elsewhere.adapter)
        with begun(server, place) as answer:
            (base / "model.safetensors").unlink()
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                answer.read()
    assert any(text.startswith("A download was broken off: it cannot be made: ") for text in caplog.messages)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


# --- in --------------------------------------------------------------------------------------------------------------


def test_the_same_idempotency_key_means_the_same_checkpoint_of_the_same_owner(
    server: RunningServer, elsewhere: Elsewhere
) -> None:
    same = {"headers": {"x-idempotency-key": "one"}}
    first, again = (imported(server, elsewhere.adapter, **same) for _ in range(2))
    assert first == again
    assert imported(server, elsewhere.adapter, key=BORIS, **same) != first
    assert imported(server, elsewhere.adapter) != first
    others = [f"base_model={MODELS[0]}&name=other", f"base_model={MODELS[1]}"]
    places = [imported(server, elsewhere.adapter, query=query, **same) for query in others]
    assert len({place.split("/")[1] for place in (first, *places)}) == 3


def test_an_import_is_a_checkpoint_like_others(server: RunningServer, elsewhere: Elsewhere) -> None:
    place = imported(server, elsewhere.adapter, query=f"base_model={MODELS[0]}&name=mine")
    run = place.split("/")[1]
    (found,) = server.get(f"training_runs/{run}/checkpoints", key=ANNA).json()["checkpoints"]
    assert (found["checkpoint_id"], found["public"]) == ("weights/mine", False)
    info = server.post("weights_info", {"tinker_path": f"tinker://{run}/weights/mine"}, key=ANNA).json()
    assert {name: info[name] for name in ("base_model", "lora_rank", "train_attn", "train_mlp", "train_unembed")} == {
        "base_model": MODELS[0],
        "lora_rank": 4,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
    }
    assert server.call("DELETE", f"/api/v1/{place}", key=ANNA).status == 204


def broken(elsewhere: Elsewhere, folder: Path, config: dict[str, Any] | None = None, **tensors: Any) -> bytes:
    """The adapter with changes: settings, and tensors by a number that stands for their name."""
    shutil.copytree(elsewhere.adapter, folder)
    settings = {**json.loads((folder / NAMES[0]).read_bytes()), **(config or {})}
    (folder / NAMES[0]).write_text(json.dumps(settings))
    save_file({**load_file(folder / NAMES[1]), **tensors}, folder / NAMES[1])
    return packed(folder)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"use_dora": True}, "uses use_dora"),
        ({"bias": "all"}, "has bias 'all'"),
        ({"modules_to_save": ["embed_tokens"]}, "uses modules_to_save"),
        ({"peft_type": "LOHA"}, "has the peft_type 'LOHA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"init_lora_weights": "OLoRA"}, "changes the base"),
        ({"init_lora_weights": "lora_ga"}, "changes the base"),
        ({"r": None}, "must be positive numbers"),
        ({"r": True}, "must be positive numbers"),
        ({"lora_alpha": "x"}, "must be positive numbers"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "is not the name of a module"),
        ({"alpha_pattern": [1]}, "must be an object"),
        ({"alpha_pattern": {"q_proj": [1]}}, "must be positive numbers"),
        ({"notes": 2**20 * "x"}, "which no tool writes"),
        ({"lora_alpha": 1e8}, None),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_settings_that_are_no_plain_lora_are_refused_by_their_name(
    server: RunningServer, elsewhere: Elsewhere, tmp_path: Path, config: dict[str, Any], complaint: str | None
) -> None:
    before = left_in(server)
    answer = send(server, broken(elsewhere, tmp_path / "adapter", config))
    if complaint is None:
        assert answer.status == 200
        return
    assert (answer.status, complaint in answer.json()["detail"]) == (422, True), answer
    assert left_in(server) == before


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({FIRST: torch.zeros(4, 31)}, "as a matrix of [32, 31], but it is [32, 32]"),
        ({FIRST: torch.full((4, 32), torch.inf)}, "its training broke down"),
        ({FIRST: torch.zeros(4, 32, dtype=torch.int8)}, "is no LoRA matrix"),
        ({FIRST.replace("layers.0", "layers.7"): torch.zeros(4, 32)}, "do not belong together"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 430)}, "is no LoRA matrix"),
        (
            {
                "base_model.model.model.norm.lora_A.weight": torch.zeros(4, 32),
                "base_model.model.model.norm.lora_B.weight": torch.zeros(1, 4),
            },
            "changes model.norm, which cannot be trained here",
        ),
        (
            {FIRST: torch.zeros(257, 32), FIRST.replace("lora_A", "lora_B"): torch.zeros(32, 257)},
            "has rank 257, and ranks go from 1 to 256",
        ),
        ({FIRST: torch.zeros(0, 32), FIRST.replace("lora_A", "lora_B"): torch.zeros(32, 0)}, "do not belong together"),
        (
            {
                f"base_model.model.{name}.lora_{half}.weight": torch.zeros(shape)
                for name in ("lm_head", "model.unembed_tokens")
                for half, shape in (("A", (4, 32)), ("B", (430, 4)))
            },
            "the same matrix of lm_head by another name",
        ),
    ],
    ids=["shape", "infinite", "integers", "half", "embedding", "norm", "rank", "no rank", "two names"],
)
def test_tensors_that_do_not_fit_are_refused_by_their_name(
    server: RunningServer, elsewhere: Elsewhere, tmp_path: Path, tensors: dict[str, torch.Tensor], complaint: str
) -> None:
    answer = send(server, broken(elsewhere, tmp_path / "adapter", **tensors))
    assert (answer.status, complaint in answer.json()["detail"]) == (422, True), answer


def forged(head: bytes, size: int | None = None) -> bytes:
    return (len(head) if size is None else size).to_bytes(8, "little") + head


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"\xff" * 8,
        forged(b"{}", 2**40),
        forged(b"[1, 2]"),
        forged(b'{"a": 1}'),
        forged(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
        forged(b'{"a": {"dtype": "F32", "shape": [1000000000], "data_offsets": [0, 4]}}'),
        forged(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}'),
        forged(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [1000, 1004]}}'),
        forged(b'{"a": ' * 100_000),
    ],
    ids=["empty", "ones", "long", "list", "number", "negative", "large", "backwards", "beyond", "deep"],
)
def test_a_file_that_is_no_safetensors_file_is_refused(
    server: RunningServer, elsewhere: Elsewhere, tmp_path: Path, weights: bytes
) -> None:
    shutil.copytree(elsewhere.adapter, tmp_path / "adapter")
    (tmp_path / "adapter" / NAMES[1]).write_bytes(weights)
    before = left_in(server)
    answer = send(server, packed(tmp_path / "adapter"))
    assert answer.status == 422, answer
    assert left_in(server) == before


def test_settings_that_are_nested_too_deeply_are_refused(
    server: RunningServer, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    shutil.copytree(elsewhere.adapter, tmp_path / "adapter")
    (tmp_path / "adapter" / NAMES[0]).write_bytes(b'{"a": ' * 100_000)
    answer = send(server, packed(tmp_path / "adapter"))
    assert (answer.status, "adapter_config.json is nested too deeply" in answer.json()["detail"]) == (422, True), answer


def hostile(kind: bytes) -> bytes:
    entry = tarfile.TarInfo("adapter_config.json")
    entry.type, entry.linkname = kind, "/etc/passwd"
    return entry.tobuf() + bytes(1024)


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        (b"", 422, "ends too early"),
        (b"x" * 2000, 422, "is no tar"),
        (bytes(1024), 422, "lacks adapter_config.json and adapter_model.safetensors"),
        (hostile(tarfile.SYMTYPE), 422, "is no plain file"),
        (hostile(tarfile.CHRTYPE), 422, "is no plain file"),
    ],
    ids=["empty", "text", "nothing", "link", "device"],
)
def test_a_body_that_is_no_tar_of_two_files_is_refused(
    server: RunningServer, body: bytes, status: int, complaint: str
) -> None:
    before = left_in(server)
    answer = send(server, body)
    assert (answer.status, complaint in answer.json()["detail"]) == (status, True), answer
    assert left_in(server) == before


def test_a_path_in_a_tar_leads_nowhere(server: RunningServer, elsewhere: Elsewhere) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in NAMES:
            archive.add(elsewhere.adapter / name, f"../../../{name}")
        archive.add(elsewhere.adapter / NAMES[0], "../../../tinsmith.json")
    before = {path for path in server.config.state.rglob("*") if path.is_file()}
    assert send(server, data.getvalue()).status == 200
    new = {path for path in server.config.state.rglob("*") if path.is_file()} - before
    assert {path.parent.name for path in new if "checkpoints" in path.parts} == {"imported"}


@pytest.mark.parametrize(
    ("query", "complaint"),
    [("", "base_model"), ("base_model=x", "'x'"), (f"base_model={MODELS[0]}&name=../x", "cannot name a checkpoint")],
)
def test_wrong_names_are_refused(server: RunningServer, elsewhere: Elsewhere, query: str, complaint: str) -> None:
    answer = send(server, packed(elsewhere.adapter), query)
    assert (answer.status, complaint in answer.json()["detail"]) == (422, True), answer


def test_a_body_larger_than_any_adapter_of_the_base_is_refused(server: RunningServer) -> None:
    entry = tarfile.TarInfo("adapter_model.safetensors")
    entry.size = 10 * 2**20
    answer = send(server, entry.tobuf() + bytes(entry.size + 1024))
    assert (answer.status, "no adapter for this base has" in answer.json()["detail"]) == (413, True), answer


def test_an_owner_without_room_and_a_full_disk_are_told_before_anything_is_kept(
    tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "state", elsewhere.base, max_checkpoint_bytes=10_000) as server:
        answer = send(server, packed(elsewhere.adapter))
        assert (answer.status, "over the limit" in answer.json()["detail"]) == (422, True), answer
        assert server.get("training_runs", key=ANNA).json()["training_runs"] == [], "an empty run was left behind"
        monkeypatch.setattr("tinsmith.server.store.reserve.free_bytes", lambda folder: 1000)
        answer = send(server, packed(elsewhere.adapter))
        assert (answer.status, "has no room for" in answer.json()["detail"]) == (422, True), answer
        assert left_in(server) == set()
        assert not os.listdir(server.config.checkpoints)
