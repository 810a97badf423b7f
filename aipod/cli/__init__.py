"""The `aipod` command: whatever goes wrong in it becomes one line and an exit code."""

import sys
import traceback

from aipod._misc.extras import explain, install


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Wherever it stands: people add it to the end of the line that has just failed.
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    try:
        import click

        from aipod.cli import _app
    except ImportError as error:
        print(
            f"aipod: the command needs the experiments extra ({error}); to add it: "
            f"{install('experiments')}",
            file=sys.stderr,
        )
        return 2
    try:
        return _app.run(arguments)
    except click.exceptions.Abort:
        return _fail("interrupted", 130)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except click.ClickException as error:
        return _fail(_app.explain(error), 2)
    except (ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        return _fail(_one_line(error), 2)
    except Exception as error:
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
        where = f" {error.filename}" if error.filename else ""
        return f"cannot use{where}: {error.strerror}; choose another path."
    return " ".join(str(error).split()) or type(error).__name__
