"""Whatever can be set, caught or imported is in the reference. That commands are, `tests/cli/test_start.py` checks."""

from __future__ import annotations

import re

import click

import tinsmith
from docs import names
from tests.docs.messages import texts_of
from tests.docs.pages import DOCS, ROOT
from tinsmith import errors, types
from tinsmith.cli.serve import command as serve
from tinsmith.client.config import Config
from tinsmith.client.retry import RetryConfig

SOURCE = ROOT / "src" / "tinsmith"
VARIABLE = re.compile(r"(?:TINKER|TINSMITH|CLOUDFLARE|HF|OMP|GOMP|WANDB|FORWARDED)_[A-Z_]*[A-Z]")


def page(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")


def missing(wanted: list[str], text: str) -> list[str]:
    return [name for name in wanted if not re.search(rf"`{re.escape(name)}[`( ]", text)]


def test_every_setting_is_documented() -> None:
    assert missing([*Config.__struct_fields__, *RetryConfig.__struct_fields__], page("settings")) == []


def test_every_option_of_the_server_is_documented() -> None:
    options = [option.opts[0] for option in serve.params if isinstance(option, click.Option)]
    assert len(options) > 9
    assert missing(options, page("settings").partition("## The server")[2]) == []


def test_every_variable_that_we_read_is_documented() -> None:
    read = {text for text in texts_of(SOURCE) if VARIABLE.fullmatch(text)}
    assert {"TINKER_API_KEY", "TINSMITH_STATE", "GOMP_SPINCOUNT"} <= read
    assert missing(sorted(read), page("settings")) == []


def test_every_feature_in_the_readme_names_tests_that_are_there() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| feature | tests |")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for feature, tests in rows:
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named, feature
        assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_error_is_documented() -> None:
    classes = [
        each.__name__
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.TinkerError) and each is not errors.TinkerError
    ]
    assert missing(classes, page("errors")) == []


def test_the_table_of_errors_names_no_others() -> None:
    named = re.findall(r"^\| `(\w+)` \|", page("errors"), re.MULTILINE)
    assert len(named) == len(set(named)) > 20
    assert [name for name in named if not hasattr(tinsmith, name)] == []


def test_the_page_of_public_names_is_up_to_date() -> None:
    assert names.PAGE.read_text(encoding="utf-8") == names.render(), "run: python docs/names.py"


def test_every_public_name_is_documented() -> None:
    text = page("names")
    listed = [name for name in (*tinsmith.__all__, *types.__all__) if name not in names.CLIENTS]
    assert missing(listed, text) == []
    assert [name for name in names.CLIENTS if f"### {name}\n" not in text] == []


def test_pages_name_only_files_that_exist() -> None:
    """Links cannot lead out of the site, so the source is named instead."""
    named = re.compile(r"`((?:bench|deploy|docs|examples|src|tests)/[\w./-]+)`")
    for file in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        wrong = [path for path in named.findall(file.read_text(encoding="utf-8")) if not (ROOT / path).exists()]
        assert wrong == [], file.name


def test_figures_of_the_performance_guide_are_those_that_were_measured() -> None:
    guide = (DOCS / "how-to" / "tune-performance.md").read_text(encoding="utf-8")
    rows = [line for line in guide.splitlines() if line.startswith("| ") and "---" not in line]
    cells = [cell for row in rows for cell in row.strip("| ").split(" | ")[1:]]
    figures = {figure for cell in cells for figure in re.findall(r"\b[\d,]*\d(?:\.\d+)?\b", cell)}
    measured = set(re.findall(r"\b[\d,]*\d(?:\.\d+)?\b", page("benchmarks")))
    assert len(figures) > 20
    assert figures - measured - {"16", "32"} == set()  # of the names of number formats


def test_every_message_that_the_troubleshooting_page_explains_is_one_of_ours() -> None:
    guide = (DOCS / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
    explained = re.findall(r"^### (.+)$", guide, re.MULTILINE)
    assert len(explained) > 40
    ours = list(texts_of(SOURCE))
    assert [each for each in explained if not any(each.strip("`") in text for text in ours)] == []


def test_the_architecture_page_has_a_place_for_every_module() -> None:
    drawing = (
        (DOCS / "explain" / "architecture.md").read_text(encoding="utf-8").partition("```text")[2].partition("```")[0]
    )
    named = set(re.findall(r"\w+", drawing))
    rooms = [SOURCE, SOURCE / "client", SOURCE / "server", SOURCE / "server" / "engine"]
    modules = {module.stem for room in rooms for module in room.glob("*.py")}
    packages = {module.parent.name for room in rooms for module in room.glob("*/__init__.py")}
    assert {name for name in (modules | packages) - named if not name.startswith("_")} == set()


def test_the_walks_name_only_modules_that_exist() -> None:
    page = (DOCS / "explain" / "architecture.md").read_text(encoding="utf-8")
    walks = page.partition("## The walk of `forward_backward`")[2].partition("## Choices")[0]
    files = re.findall(r"`([\w/]+\.py)`", walks)
    assert len(files) > 20
    assert [file for file in files if not [*SOURCE.rglob(file)]] == []
