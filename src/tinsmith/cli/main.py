"""`tinsmith`: the commands, and the options that all of them share."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tinsmith._version import __version__
from tinsmith.cli.lazy import LazyGroup
from tinsmith.cli.options import Options
from tinsmith.cli.params import Number

COMMANDS = {
    "audit": "See who did what on a server of yours.",
    "auth": "Log in and out, and see whose key it is.",
    "backup": "Copy the state of a server of yours to FOLDER, while it works or not.",
    "billing": "See what was used and what it costs.",
    "chat": "Talk to a base model or a checkpoint.",
    "checkpoint": "List, share, download and delete checkpoints.",
    "completion": "Print the script that completes commands in a shell.",
    "doctor": "Check this installation, the key and the server, and say what to do.",
    "keys": "Make, list and revoke the API keys of a server of yours.",
    "model": "List the base models of a server.",
    "run": "List training runs.",
    "sample": "Let a model or a checkpoint continue a text.",
    "serve": "Serve the Tinker API on this machine.",
    "session": "Export the timeline of a session.",
    "train": "Train a model on a file of examples.",
    "version": "Show the version.",
}
DEFAULT_TIMEOUT_SECONDS = 10.0


@click.group(
    cls=LazyGroup,
    package="tinsmith.cli",
    summaries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "-f",
    "--format",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Tables for people, or JSON for programs.",
)
@click.option("--base-url", metavar="URL", help="The server, or 'local'; else TINKER_BASE_URL or the hosted service.")
@click.option("--api-key", metavar="KEY", help="Else TINKER_API_KEY, or the key of `tinsmith auth login`.")
@click.option(
    "--timeout",
    type=Number(min=0.1),
    default=DEFAULT_TIMEOUT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="When to give up on a server that does not answer.",
)
@click.version_option(__version__, prog_name="tinsmith", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, format: str, base_url: str | None, api_key: str | None, timeout: float) -> None:
    """Both ends of the Tinker training API."""
    ctx.obj = Options(format, base_url, api_key, timeout)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and gives its exit code. Whatever goes wrong has been told on stderr by then."""
    try:
        code = cli.main(arguments, prog_name="tinsmith", standalone_mode=False)
    except SystemExit:  # click's own, when it was asked for completions
        raise
    except BaseException as error:  # noqa: BLE001 - nothing but an exit code leaves this program
        from tinsmith.cli.failures import report

        code = report(error)
    return code if isinstance(code, int) else 0
