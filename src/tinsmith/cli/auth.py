"""`tinsmith auth`: the key of this machine."""

from __future__ import annotations

import getpass
import os
import platform
import sys
from urllib.parse import quote

import click

from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.failures import FAILED, explain
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, emit_properties, note


@click.group()
def command() -> None:
    """Log in and out, and see whose key it is."""


@command.command("login")
@click.pass_obj
def login(options: Options) -> None:
    """Store a key in ~/.tinker/credentials.json, after the server has accepted it.

    The key is asked for without an echo, or read from standard input if that is no terminal.
    """
    from tinsmith.cli.key_file import store_default_key
    from tinsmith.client.credentials import stored_key

    if stored_key():
        raise CommandFailed("You are logged in already.", remedy="Run `tinsmith auth logout` first.")
    name = f"tinker-cli-{platform.node() or 'unknown'}"
    key = options.api_key or _ask_for_key(options, name)
    with Server(options._replace(api_key=key)) as server, server.patience():
        server.service.get_server_capabilities()
    note(f"The key works. It was stored in {store_default_key(key, name)}.")
    if os.environ.get("TINKER_API_KEY"):
        note("TINKER_API_KEY is set and goes before the stored key.")


def _ask_for_key(options: Options, name: str) -> str:
    if sys.stdin is None or not sys.stdin.isatty():
        key = sys.stdin.readline().strip() if sys.stdin else ""
        if not key:
            raise click.UsageError("There is no terminal to ask at, and no key on standard input.")
        return key
    note(f"Make a key {_where_keys_are_made(options, name)}.")
    return getpass.getpass("API key: ").strip()


def _where_keys_are_made(options: Options, name: str) -> str:
    from tinsmith.client.console import CONSOLE

    if options.base_url or os.environ.get("TINKER_BASE_URL"):
        return f"on the machine of the server: tinsmith keys create {name}"
    return f"at {CONSOLE}/keys?new_key=true&key_name={quote(name)}"


@command.command("logout")
def logout() -> None:
    """Forget the stored key. It stays good until it is revoked."""
    from tinsmith.cli.key_file import remove_default_key
    from tinsmith.client.console import CONSOLE

    record = remove_default_key()
    if record is None:
        note("You are not logged in.")
        return
    name = record.get("name", "")
    note(f"The key {name!r} was removed from this machine. The server still takes it: revoke it at {CONSOLE}/keys,")
    note("or for a server of your own with `tinsmith keys revoke`.")


@command.command("status")
@click.pass_context
def status(ctx: click.Context) -> None:
    """Show whether there is a key and whether the server takes it; the exit code is 1 if not."""
    from tinsmith import auth

    options: Options = ctx.obj
    has_key = options.api_key is not None or auth.tinker_has_credentials()
    problem = _problem(options)
    if options.wants_json:
        emit_json({"credentials_available": has_key, "tinker_accessible": problem is None, "problem": problem})
    else:
        words = {True: "yes", False: "no"}
        emit(f"Credentials available: {words[has_key]}\nTinker accessible: {words[problem is None]}\n")
        if problem:
            note(f"Error: {problem}")
    if problem:
        ctx.exit(FAILED)


def _problem(options: Options) -> str | None:
    """Why the server cannot be used, or None."""
    from tinsmith.errors import TinkerError

    try:
        with Server(options) as server, server.patience():
            server.service.get_server_capabilities()
    except TinkerError as error:
        return str(explain(error))
    return None


@command.command("whoami")
@click.pass_obj
def whoami(options: Options) -> None:
    """Show whose key it is, on servers that exchange it for a token."""
    with Server(options) as server:
        who = server.wait(server.rest.whoami())
    if options.wants_json:
        emit_json({"user_urn": who.user_urn, "org_urn": who.org_urn, "email": who.email})
    else:
        rows = [("Email", who.email or "N/A"), ("User", who.user_urn), ("Organization", who.org_urn)]
        emit_properties("", rows)
