"""Starting costs little, help is complete, and the page of commands says the same."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from docs import commands
from tests.cli.program import COMMAND, InProcess, Program, environment
from tinsmith.cli.main import COMMANDS, cli

HEAVY = ("torch", "transformers", "numpy", "msgspec", "pyqwest", "rich", "sqlalchemy", "asyncio", "google.protobuf")


@pytest.mark.parametrize("argument", ["--help", "version"])
def test_help_and_version_load_nothing_but_click(argument: str) -> None:
    code = f"""
import sys
sys.argv = ["tinsmith", {argument!r}]
from tinsmith.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(*[name for name in {HEAVY} if name in sys.modules], *[n for n in sys.modules if n.startswith("tinsmith.cli.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert {"tinsmith.cli.main", "tinsmith.cli.lazy", "tinsmith.cli.options"} <= set(loaded)
    assert set(loaded) <= {
        f"tinsmith.cli.{name}" for name in ("main", "lazy", "options", "params", "version", "output", "errors")
    }


def test_no_command_loads_the_sdk_before_it_runs() -> None:
    code = f"""
import sys
from importlib import import_module
for name in {tuple(COMMANDS)}:
    import_module(f"tinsmith.cli.{{name}}")
print(*[name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_the_first_line_of_its_help(name: str) -> None:
    command: click.Command = import_module(f"tinsmith.cli.{name}").command
    assert (command.help or "").splitlines()[0] == COMMANDS[name]


def test_the_page_of_commands_is_up_to_date() -> None:
    page = commands.PAGE.read_text(encoding="utf-8")
    assert page == commands.render(), "run: python docs/commands.py"


def test_every_command_and_option_explains_itself() -> None:
    for command in every_command(cli):
        assert command.help, command.name
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{command.name} {option.opts}"
                assert option.is_flag or option.metavar or isinstance(option.type, click.Choice), option.opts


def every_command(group: click.Group) -> list[click.Command]:
    context = click.Context(group)
    found = [command for name in group.list_commands(context) if (command := group.get_command(context, name))]
    return [group, *(each for one in found for each in (every_command(one) if isinstance(one, click.Group) else [one]))]


def test_the_shell_completes_commands_and_options(home: Path) -> None:
    def completions(line: str) -> list[str]:
        words = line.split(" ")
        asked = {"_TINSMITH_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run([COMMAND], env=environment(home, **asked), capture_output=True, text=True, timeout=60)
        return [each.partition(",")[2] for each in done.stdout.splitlines()]

    assert completions("tinsmith che") == ["checkpoint"]
    assert completions("tinsmith checkpoint d") == ["delete", "download"]
    assert completions("tinsmith checkpoint download --f") == ["--force"]


def test_the_script_for_the_shell_is_printed(cli: InProcess) -> None:
    script = cli("completion", "zsh").out
    assert "_TINSMITH_COMPLETE=zsh_complete tinsmith" in script


def test_without_click_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['click'] = None; from tinsmith.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    remedy = "pip install 'tinsmith[cli]' (from a checkout: pip install '.[cli]')"
    assert done.stderr == f"The tinsmith command needs the package 'click': {remedy}.\n"


def test_the_module_is_the_program(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith", "run"], env=environment(home), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "Usage: tinsmith run " in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["checkpoint", "lst"], "No such command 'lst'. Did you mean 'list'?"),
        (["zzzz"], "No such command 'zzzz'."),
    ],
)
def test_a_mistyped_command_is_told_with_what_may_have_been_meant(cli: InProcess, words: list[str], told: str) -> None:
    done = cli(*words)
    assert done.code == 2
    assert done.err.endswith(f"Error: {told}\n")


def test_help_is_not_an_error(program: Program) -> None:
    done = program("run", "list", "-h")
    assert (done.code, done.err) == (0, "")
    assert "--columns NAMES" in done.out
