"""The `kvaffinity` command."""

from __future__ import annotations

import asyncio
import importlib
import logging
from pathlib import Path

import click

from extproc.config import ConfigError, load

_LABORATORY = {
    "bench": ("extproc.lab.bench", "Measure what an ext_proc server adds to a request, and the core alone."),
    "compare": ("extproc.lab.peers.compare", "Send the same load through this router and through other ones."),
    "demo": ("extproc.lab.demo", "Compare round robin and kvaffinity on four simulated nodes."),
    "node": ("extproc.lab.node", "Run a simulated node: an OpenAI server with a real prefix cache."),
    "replay": ("extproc.lab.replay.replay", "Replay a trace on a simulated fleet, through ours and the peers' rules."),
    "suite": ("extproc.lab.replay.suite", "Judge the policy in a listed set of traces, loads and fleets."),
}


class _Commands(click.Group):
    """The laboratory is imported only when one of its commands is called: the server does not need it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
        rows += [(name, text) for name, (_, text) in _LABORATORY.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LABORATORY:
            return super().get_command(ctx, cmd_name)
        try:
            command = getattr(importlib.import_module(_LABORATORY[cmd_name][0]), cmd_name)
        except ModuleNotFoundError as error:
            raise click.ClickException(f"{error.name} is missing: pip install 'kvaffinity[lab]' brings it") from error
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvaffinity")
def main() -> None:
    """Send each LLM request to the node that already holds its KV cache, as Envoy's external processor."""


@main.command()
@click.option(
    "--config", "path", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The TOML file to read."
)
@click.option(
    "--log-level", default="INFO", show_default=True, type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"])
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append every routed request to this file, for `kvaffinity replay`: hashes, lengths and times, no text.",
)
def serve(path: Path, log_level: str, record: Path | None) -> None:
    """Serve ext_proc, the access log and gRPC health until SIGTERM. SIGHUP, or a changed file, reloads it."""
    from extproc.app import App

    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(App(load(path), path, record=record).run())
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
def check(path: Path) -> None:
    """Say whether a configuration file can be used, and what it says."""
    from extproc import fleets

    try:
        config = load(path)
        fleets.check(config)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    for model in config.models:
        click.echo(f"{model.name}: {len(model.nodes)} nodes")


if __name__ == "__main__":
    main()
