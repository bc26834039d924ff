"""`make docs`: the pages as a site that needs nothing but itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import DOCS, ROOT

CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does, in a copy of the tree, because the builder writes beside what it reads."""
    copy = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "zensical.toml", copy)
    shutil.copytree(DOCS, copy / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    done = build(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    built: Path = copy / CONFIG["site_dir"]
    return built


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_broken_link_or_anchor_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "x"\n')
    for link in ("nowhere.md", "index.md#nowhere"):
        (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n[link]({link})\n")
        assert build(tmp_path).returncode != 0, link


def leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(below)


def test_every_page_is_on_a_shelf() -> None:
    assert sorted(leaves(CONFIG["nav"])) == SOURCES
    shelves = [name for entry in CONFIG["nav"] for name in entry]
    assert shelves == ["Home", "Quickstart", "How-to", "Reference", "Explain"]


class Loaded(HTMLParser):
    """What a browser fetches for a page, where its links lead, and what marks it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.meta: dict[str, str] = {}
        self.schemes: set[str] = set()
        self.components: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        self.schemes.add(values.get("data-md-color-scheme", ""))
        self.components.add(values.get("data-md-component", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "meta" and "name" in values:
            self.meta[values["name"]] = values.get("content", "")
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "modulepreload"):
            self.fetched.append(values["href"])
        elif "src" in values:
            self.fetched.append(values["src"])


@pytest.fixture(scope="module")
def loaded(site: Path) -> dict[Path, Loaded]:
    return {page: Loaded(page) for page in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site: Path, loaded: dict[Path, Loaded]) -> None:
    for page, found in loaded.items():
        for address in found.fetched:
            assert not urlsplit(address).netloc, f"{page.name} loads {address}"
            if page.name != "404.html":  # which is shown at any depth, so it names files from the root
                assert (page.parent / urlsplit(address).path).is_file(), f"{page.name} loads {address}"
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")) == []


def test_every_link_and_anchor_of_the_built_pages_leads_somewhere(loaded: dict[Path, Loaded]) -> None:
    broken = []
    for page, found in loaded.items():
        for address in found.links:
            parts = urlsplit(address)
            if parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / parts.path).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (parts.fragment and parts.fragment not in loaded[target].ids):
                broken.append((page.name, address))
    assert broken == []


def test_the_search_box_knows_every_page(site: Path) -> None:
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    assert {item["location"].partition("#")[0] for item in items} == {page[:-3] + ".html" for page in SOURCES}
    text = " ".join(item["text"] for item in items)
    for word in ("TINKER_BASE_URL", "--session-timeout", "forward_backward", "PendingLimitError"):
        assert word in text


def test_the_pages_fit_a_phone_and_come_in_light_and_dark(site: Path, loaded: dict[Path, Loaded]) -> None:
    index = loaded[site / "index.html"]
    assert "width=device-width" in index.meta["viewport"]
    assert {"default", "slate"} <= index.schemes
    assert "search" in index.components
