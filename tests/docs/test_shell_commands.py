"""Every command that the pages show exists, with the options they give it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, blocks, page_name
from tests.docs.shell import assigned, check_tinsmith, commands, program

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
INLINE = re.compile(r"`(tinsmith [^`\n]+)`")
GENERATED = DOCS / "reference" / "commands.md"
STANDS_FOR = {
    "$CHECKPOINT": "tinker://run/weights/name",
    "$TRAINING_STATE": "tinker://run/weights/name",
    "$SAMPLER_WEIGHTS": "tinker://run/sampler_weights/name",
    "pirate.jsonl": __file__,  # must exist
}


def shown(page: Path) -> list[list[str]]:
    """The commands of a page: in blocks, and in the text."""
    texts = [*blocks(page, "bash"), *INLINE.findall(page.read_text(encoding="utf-8"))]
    return [words for text in texts for words in commands(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if page != GENERATED], ids=page_name)
def test_every_tinsmith_command_on_a_page_exists(page: Path) -> None:
    for words in shown(page):
        name, *arguments = program(words) or [""]
        if name == "tinsmith":
            try:
                check_tinsmith([STANDS_FOR.get(word, word) for word in arguments])
            except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
                pass  # the text may speak of one option, or of a family of commands
            except click.ClickException as error:
                pytest.fail(f"{' '.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_what_a_page_installs_makes_or_runs_exists(page: Path) -> None:
    for words in shown(page):
        name, *arguments = program(words) or [""]
        if name == "pip":
            wanted = re.findall(r"(?:\.|tinsmith|source)\[([\w,]+)\]", " ".join(arguments))
            assert set(",".join(wanted).split(",")) - {""} <= EXTRAS.keys(), words
        elif name == "make":
            assert set(arguments) <= set(TARGETS), words
        elif name == "python" and arguments and arguments[0].endswith(".py"):
            assert (ROOT / arguments[0]).is_file(), words


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_variable_that_a_page_sets_for_us_is_in_the_reference(page: Path) -> None:
    settings = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    names = {name for words in shown(page) for name in assigned(words)}
    ours = {name for name in names if name.startswith(("TINKER_", "TINSMITH_", "HF_", "FORWARDED_", "OMP_"))}
    assert {name for name in ours if f"`{name}`" not in settings} == set()
