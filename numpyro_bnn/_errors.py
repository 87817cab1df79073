"""The one form of error message of this package."""

from typing import Any

__all__ = ["argument_error", "unknown_name"]


def argument_error(
    call: str, argument: str, got: Any, instead: str, kind: type[Exception] = ValueError
) -> Exception:
    """Build (the caller raises it) an error that teaches: call, argument, what came, what to write instead.

    :param call: the public name the user wrote, e.g. ``"nn.Dense"``.
    :param argument: the argument at fault, e.g. ``"units"``.
    :param got: what came; strings are quoted as they are, anything else by ``repr``.
    :param instead: a sentence that says what to write instead.
    :param kind: ``ValueError`` (default) or ``TypeError``.
    """
    came = got if isinstance(got, str) else repr(got)
    return kind(f"{call}: argument `{argument}` got {came}. {instead}")


def unknown_name(call: str, argument: str, got: Any, known: Any) -> Exception:
    """Build the error for a name outside a table, with the closest known name first.

    :param known: an iterable of the names that exist.
    """
    from difflib import get_close_matches

    names = [str(name) for name in known]
    by_lower = {name.lower(): name for name in names}
    close = get_close_matches(str(got).lower(), by_lower, n=1)
    hint = f"Did you mean {by_lower[close[0]]!r}? " if close else ""
    return argument_error(call, argument, repr(got), f"{hint}Known: {', '.join(names)}.")
