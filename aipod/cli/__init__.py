"""The `aipod` command. Every error becomes one line and an exit code."""

import sys
import traceback

from aipod._misc.extras import explain, install

# The exit code of a program whose reader closed the pipe, as in `aipod list | head -1`.
_CLOSED_PIPE = 141


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Anywhere on the line: people append it to the command that has just failed.
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    try:
        from aipod.cli import _app, _terminal
    except ImportError as error:
        print(
            f"aipod: the command needs the experiments extra ({error}); to add it: "
            f"{install('experiments')}",
            file=sys.stderr,
        )
        return 2
    _terminal.spell_out()
    try:
        code = _app.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (BrokenPipeError, SystemExit) as error:
        # Rich and Typer raise SystemExit when the reader has closed the pipe.
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            _terminal.forget_output()
            return _CLOSED_PIPE
        return int(error.code or 0)
    except MemoryError as error:
        return _fail(f"not enough memory ({_one_line(error)}): choose smaller sizes.", 2)
    except (ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        return _fail(_one_line(error), 2)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):  # JAX's error when memory runs out
            return _fail("not enough memory on the device: choose smaller sizes.", 2)
        # With the flower extra alone there is a command, but nothing to draw with.
        if isinstance(error, ImportError) and (remedy := explain(error)):
            return _fail(remedy, 2)
        if debug:
            traceback.print_exc()
            return 1
        return _fail(
            f"unexpected {type(error).__name__}: {_one_line(error)} (--debug shows more)", 1
        )


def _fail(message: str, code: int) -> int:
    print(f"aipod: {message}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        name = str(error.filename or "")
        name = name if len(name) <= 200 else f"{name[:60]}... ({len(name):,} characters)"
        where = f" {name}" if name else ""
        return f"cannot use{where}: {error.strerror}; choose another path."
    return " ".join(str(error).split()) or type(error).__name__
