"""The documentation is true: its Python blocks run, and its reference pages are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import names
from tests.support.server import FakeServer
from tinsmith import errors
from tinsmith.client.config import Config
from tinsmith.client.retry import RetryConfig

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!http)([^)#]+)")


def blocks(page: Path) -> list[str]:
    return PYTHON_BLOCK.findall(page.read_text())


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=page_name)
def test_the_examples_of_a_page_run_from_top_to_bottom(page: Path) -> None:
    with FakeServer() as server:
        env = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-docs"}
        script = "\n".join(blocks(page))
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert broken == []


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs/reference/settings.md").read_text()
    fields = (*Config.__struct_fields__, *RetryConfig.__struct_fields__)
    assert [field for field in fields if f"`{field}`" not in text] == []


def test_every_error_is_documented() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text()
    classes = [
        each.__name__
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.TinkerError) and each is not errors.TinkerError
    ]
    assert [each for each in classes if f"`{each}`" not in text] == []


def test_the_page_of_public_names_is_up_to_date() -> None:
    page = names.PAGE.read_text(encoding="utf-8")
    assert page == names.render(), "run: python docs/names.py"


RETIRED = re.compile(r"\b(transient|fatal)\b", re.IGNORECASE)
"""Names of error categories that older descriptions of this API use."""


def test_no_page_or_comment_speaks_of_retired_values() -> None:
    texts = [*PAGES, *ROOT.glob("src/tinsmith/types/*.py"), *ROOT.glob("src/tinsmith/client/*.py")]
    assert [page_name(text) for text in texts if RETIRED.search(text.read_text(encoding="utf-8"))] == []
