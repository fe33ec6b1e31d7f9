"""The command line: parse, call, print. What it knows about a store it asks the package."""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

import diskbuf
from diskbuf_tools import checking, counting, drawing, exchanging, learning, looking, moving, tidying, watching
from diskbuf_tools.wording import in_shell_words

# In the order of `diskbuf --help`. Each module has PANEL, its heading there, and VERBS, a function each: the verb is
# its name, what it returns the exit code, None for 0. What a verb needs is imported in it, so that all start quickly.
_MODULES = (looking, counting, watching, drawing, checking, moving, tidying, exchanging, learning)
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_COMPLETION = "_DISKBUF_COMPLETE"  # set by the shell's completion script


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The words after `diskbuf`; None takes them from the process.

    Returns:
        The exit code: 0; 1 when a fault was found or an operation failed; 2 when the words make no command, or one of
        them is outside its rule; 130 after Ctrl-C. Errors of diskbuf and of the file system are one line on stderr.
    """
    _settle_streams()
    command = typer.main.get_command(_app())
    if _COMPLETION in os.environ:
        command(prog_name="diskbuf")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            with command.make_context("diskbuf", list(sys.argv[1:] if argv is None else argv)) as context:
                code = command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except BrokenPipeError:  # `diskbuf head STORE | head -1` has read enough
        _drop_output()
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted; stores are as the last finished step left them.", 130)
    except typer.Abort:
        return _fail("stopped; nothing was done.", 1)
    except typer.TyperException as error:
        if not error.format_message():  # no word at all: the help was shown
            return error.exit_code
        where = getattr(getattr(error, "ctx", None), "command_path", "diskbuf")
        said = error.format_message().strip().rstrip(".")
        return _fail(f"{said}{'' if said.endswith('?') else '.'} See {where} --help.", error.exit_code)
    except diskbuf.OptionError as error:
        return _fail(error, 2)
    except (diskbuf.DiskbufError, OSError) as error:
        return _fail(error, 1)
    except MemoryError as error:
        return _fail(f"this must fit into memory, but: {str(error) or 'there is none left'}.", 1)
    return code or 0


def _settle_streams() -> None:
    """Opens streams that the caller has closed on nothing, and lets what they can't encode be written escaped.

    Otherwise the next file that is opened, one of a store perhaps, would get the number of the closed stream, and with
    it what libraries print there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        elif number and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Lets what is still to be printed go, or the exit would fail flushing it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _app() -> typer.Typer:
    app = typer.Typer(name="diskbuf", no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_SETTINGS)
    app.callback()(_diskbuf)
    for module in _MODULES:
        for verb in module.VERBS:
            app.command(
                verb.__name__.rstrip("_").replace("_", "-"), rich_help_panel=module.PANEL, context_settings=_SETTINGS
            )(verb)
    return app


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        print(f"diskbuf {diskbuf.__version__}")
        raise typer.Exit


def _diskbuf(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Print the version.")
    ] = False,
) -> None:
    """Look at replay buffers on disk, mend them, move them, draw them."""


def _fail(message: object, code: int) -> int:
    with contextlib.suppress(OSError):  # the exit code still tells
        print(f"diskbuf: {in_shell_words(message)}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"diskbuf: {in_shell_words(message)}", file=sys.stderr)
