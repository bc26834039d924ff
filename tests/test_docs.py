"""The documentation is true: its Python blocks run, and it speaks of nothing that is gone. More is in `tests/docs/`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, page_name
from tests.support.server import FakeServer

LINK = re.compile(r"\]\((?!http)([^)#]+)")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_name)
def test_the_examples_of_a_page_run_from_top_to_bottom(page: Path) -> None:
    with FakeServer() as server:
        env = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-docs"}
        script = "\n".join(blocks(page, "python"))
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert broken == []


RETIRED = re.compile(r"\b(transient|fatal)\b", re.IGNORECASE)
"""Names of error categories that older descriptions of this API use."""


def test_no_page_or_comment_speaks_of_retired_values() -> None:
    texts = [*PAGES, *ROOT.glob("src/tinsmith/types/*.py"), *ROOT.glob("src/tinsmith/client/*.py")]
    assert [page_name(text) for text in texts if RETIRED.search(text.read_text(encoding="utf-8"))] == []
