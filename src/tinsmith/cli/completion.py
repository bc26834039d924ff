"""`tinsmith completion`: the script that teaches a shell our commands."""

from __future__ import annotations

import click

from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.output import emit

VARIABLE = "_TINSMITH_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands in a shell.

    \b
    bash:  eval "$(tinsmith completion bash)"        in ~/.bashrc
    zsh:   eval "$(tinsmith completion zsh)"         in ~/.zshrc
    fish:  tinsmith completion fish > ~/.config/fish/completions/tinsmith.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise CommandFailed(f"This version of click knows no completion for {shell}.")
    root = ctx.find_root()
    emit(kind(root.command, {}, str(root.info_name), VARIABLE).source() + "\n")
