"""The ``optkit`` command: the table of commands, and the place where errors become exit codes.

Exit codes: 0 done, 1 a bug in optkit, 2 an error for the user to fix (also wrong usage), 130 interrupted. Codes
above 2 belong to single commands (a missed SLO, a failed verification) and are listed in the command's help.

``optkit COMMAND`` imports the module of the command, ``optkit --help`` all modules. The modules are cheap to import:
torch and transformers are imported inside the functions.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, NoReturn

import typer

from optkit import __version__
from optkit.cli import console
from optkit.cli.help import PlainCommand, summary
from optkit.errors import UserError
from optkit.extras import explained
from optkit.machine import logs
from optkit.machine.parent import sigterm_exits
from optkit.machine.stack_room import OF_A_PROCESS, with_stack_room
from optkit.machine.torch_threads import wait_shortly

COMMANDS = {
    "optimize": "optkit.cli.optimize:optimize",
    "plan": "optkit.cli.plan:plan",
    "serve": "optkit.cli.serve:serve",
    "deploy": "optkit.cli.deploy:deploy",
    "bench": "optkit.cli.bench:bench",
    "profile": "optkit.cli.profile:profile",
    "tune": "optkit.cli.tune:tune",
    "inspect": "optkit.cli.inspect:inspect",
    "rebuild": "optkit.cli.rebuild:rebuild",
    "verify": "optkit.cli.verify:verify",
    "eval": "optkit.cli.eval:eval_command",
    "report": "optkit.cli.report:report",
    "export": "optkit.cli.export:export",
    "doctor": "optkit.cli.doctor:doctor",
    "recipe": "optkit.cli.recipe:app",
}


def _print_version(asked: bool) -> None:
    if asked:
        console.stdout.print(f"optkit {__version__}")
        raise typer.Exit


def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors; allowed anywhere on the command line.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Compile a language model for a short time to first token, measure every step, and serve the result."""


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with the commands ``names``; no other command is imported."""
    app = typer.Typer(
        name="optkit",
        help="Compile a language model for a short time to first token, measure every step, and serve the result.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in names:
        module, attribute = COMMANDS[name].split(":")
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=PlainCommand, short_help=summary(command))(command)
    return app


def commands_of(arguments: Sequence[str]) -> Iterable[str]:
    """The command at the start of a command line; all commands for help, and for the error for an unknown one."""
    word = next((word for word in arguments if word != "--debug"), "")
    return [word] if word in COMMANDS else COMMANDS


@with_stack_room(OF_A_PROCESS)
def run(arguments: Sequence[str]) -> int:
    """Run a command line and return the exit code."""
    debug = "--debug" in arguments
    wait_shortly()
    try:
        app = application(commands_of(arguments))
        with sigterm_exits():  # temporary files go, as after Ctrl-C
            app([word for word in arguments if word != "--debug"], prog_name="optkit")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        console.stderr.print("interrupted")
        return 130
    except UserError as error:
        if debug:
            console.stderr.print_exception()
        console.error_panel(error)
        return 2
    except Exception as error:  # noqa: BLE001 - the last line of defence
        if debug:
            console.stderr.print_exception()
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    """Print an unexpected exception; return the exit code."""
    known = explained(error)
    if known:
        console.error_panel(known)
        return 2
    console.bug_panel(error)
    return 1


def main() -> NoReturn:
    """Entry point of the ``optkit`` script."""
    logs.silence_progress_bars()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
