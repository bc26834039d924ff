"""`tinsmith doctor`: what is wrong with this installation, and what to do about it."""

from __future__ import annotations

from pathlib import Path

import click

from tinsmith.cli.failures import FAILED
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, printable


@click.command("doctor")
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="That of `tinsmith serve`; else TINSMITH_STATE or ~/.tinsmith.",
)
@click.pass_context
def command(ctx: click.Context, state: Path | None) -> None:
    """Check this installation, the key and the server, and say what to do.

    Nothing is changed or started. A warning is no hindrance; with a fault something does not work, and the exit code
    is 1.
    """
    from tinsmith.cli.doctor_install import TorchProbe, check_install
    from tinsmith.cli.doctor_places import check_places
    from tinsmith.cli.doctor_report import FAULT, WARNING
    from tinsmith.cli.doctor_server import check_server, is_local

    options: Options = ctx.obj
    with TorchProbe() as torch:  # which takes its time, while the others are asked
        local = is_local(options)
        places, served = check_places(state, needed=local or state is not None), check_server(options)
        checks = [*check_install(needs_server=local), torch.check(needed=local), *served, *places]
    faults, warnings = (sum(check.status == status for check in checks) for status in (FAULT, WARNING))
    if options.wants_json:
        emit_json({"checks": [check._asdict() for check in checks], "faults": faults, "warnings": warnings})
    else:
        width = max(len(check.name) for check in checks)
        lines = [*(check.lines(width) for check in checks), f"Faults: {faults}. Warnings: {warnings}.\n"]
        emit(printable("".join(lines)))
    if faults:
        ctx.exit(FAILED)
