"""The files of the dashboard, as a browser gets them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.api.running import RunningServer

WEB = Path(__file__).parents[2] / "src" / "tinsmith" / "server" / "web"
FILES = [file.name for file in WEB.iterdir() if file.suffix in (".css", ".js", ".svg")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("state"), api_keys=("tml-good",)) as running:
        yield running


@pytest.mark.parametrize("path", ["/", *(f"/web/{name}" for name in FILES)])
def test_a_file_comes_without_a_key_and_lets_no_other_script_in(server: RunningServer, path: str) -> None:
    answer = server.call("GET", path, key=None)
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_types_are_what_a_browser_insists_on(server: RunningServer) -> None:
    types = {path: server.call("GET", path).headers["content-type"] for path in ("/", "/web/app.js", "/web/style.css")}
    assert types["/"] == "text/html; charset=utf-8"
    assert types["/web/app.js"].startswith("text/javascript")
    assert types["/web/style.css"].startswith("text/css")


def test_a_file_that_is_known_is_not_sent_again(server: RunningServer) -> None:
    etag = server.call("GET", "/web/app.js").headers["etag"]
    again = server.call("GET", "/web/app.js", headers={"if-none-match": etag})
    assert (again.status, again.body) == (304, b"")
    assert server.call("GET", "/web/app.js", headers={"if-none-match": '"another"'}).status == 200


@pytest.mark.parametrize("name", ["__init__.py", "index.html", "..%2Fapp.py", "%2e%2e", "nothing.js", "a/b"])
def test_nothing_else_is_there(server: RunningServer, name: str) -> None:
    assert server.call("GET", f"/web/{name}").status == 404


def test_the_page_asks_for_a_key_where_one_is_needed(server: RunningServer, tmp_path: Path) -> None:
    assert b'data-key="asked"' in server.call("GET", "/").body
    with RunningServer(tmp_path) as without_keys:
        page = without_keys.call("GET", "/")
        assert b'data-key="any"' in page.body
        without_keys.store.keys.create("owner", "the first")
        asking = without_keys.call("GET", "/", headers={"if-none-match": page.headers["etag"]})
        assert asking.status == 200
        assert b'data-key="asked"' in asking.body


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_no_module_makes_markup_of_text(name: str) -> None:
    source = (WEB / name).read_text(encoding="utf-8")
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", source) == []
    )


def test_no_file_names_another_host() -> None:
    for file in WEB.iterdir():
        if file.suffix in (".html", ".css", ".js", ".svg"):
            addresses = re.findall(r"https?://[^\s\"']+", file.read_text(encoding="utf-8"))
            assert [address for address in addresses if address != "http://www.w3.org/2000/svg"] == [], file.name
