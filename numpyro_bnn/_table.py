"""Small tables of text."""

from collections.abc import Iterable, Sequence

__all__ = ["text_table"]


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others, numbers, to the right.

    >>> print(text_table(["model", "bound"], [["linear", "-12.0"], ["tanh", "-9.5"]]))
    model   bound
    linear  -12.0
    tanh     -9.5
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in aligned)
