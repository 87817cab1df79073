"""The page of the docs that shows the table: ways across, problems down."""

from collections import Counter
from collections.abc import Mapping

from truth.cells import FAMILIES_OF, GROUPS, KNOWN_FAILURES, ROOT, Cell, cells, key_of
from truth.problems import FAMILIES

PAGE = ROOT / "docs" / "what_works.md"
MARKS = {"right": "✓", "refused": "–", "known failure": "✗"}
INTRODUCTION = """\
# What works with what

Every mark below is a test. A model whose posterior is known (by quadrature in NumPy, written by hand beside the
model) is crossed with a way to sample, approximate or export it:

- **✓** the answer is right: chains that start at the posterior keep its moments, within five standard errors of 2,048
  independent chains (kernels with a known bias: and within .03 posterior standard deviations, `MCLMC` .05); the
  evidence by importance weights of a guide agrees with the integral, and its bound lies below; densities and
  exported log likelihoods agree to rounding; `AutoADF` agrees with dense moment matching.
- **–** the package refuses before any work, with an error that says what to write instead.
- **✗** a known failure, explained below the tables.
- Empty: not crossed, as the way has nothing to say about the model.

`make truth` measures all of it again and writes this page; the models are in `tests/truth/problems.py`.
"""


def mark(cell: Cell, found: Mapping[str, Mapping]) -> str:
    """The mark of a cell."""
    if (cell.way, cell.problem) in KNOWN_FAILURES:
        return MARKS["known failure"]
    row = found.get(key_of(cell))
    return MARKS.get(row["outcome"], "?") if row else ""


def table(family: str, found: Mapping[str, Mapping]) -> list[str]:
    """The tables of one family of problems, one per group of ways."""
    lines = []
    names = {problem.name for problem in FAMILIES[family]}
    for group, ways in GROUPS.items():
        columns = [way for way in ways if family in FAMILIES_OF[way]]
        marks = {(c.way, c.problem): mark(c, found) for c in cells(group) if c.problem in names}
        columns = [way for way in columns if any(w == way for w, _ in marks)]
        if columns:
            lines += [f"### {family.capitalize()}: {group}", "", f"| | {' | '.join(columns)} |"]
            lines += [f"| --- |{' :-: |' * len(columns)}"]
            for problem in FAMILIES[family]:
                shown = [marks.get((way, problem.name), "") for way in columns]
                lines.append(f"| {problem.name} | {' | '.join(shown)} |")
            lines.append("")
    return lines


def refusals(found: Mapping[str, Mapping]) -> list[str]:
    """The messages of the refused cells, with the models they are about."""
    about: dict[tuple[str, str], list[str]] = {}
    for cell in cells():
        row = found.get(key_of(cell))
        if row and row["outcome"] == "refused":
            about.setdefault((cell.way, row["text"]), []).append(cell.problem)
    lines = ["## What is refused, and why", "", "| way | models | message |", "| --- | --- | --- |"]
    for (way, text), problems in about.items():
        message = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {way} | {', '.join(problems)} | {message} |")
    return [*lines, ""]


def write_page(found: Mapping[str, Mapping]) -> None:
    """Write the page from the outcomes."""
    known = {f"{way} | {problem}" for way, problem in KNOWN_FAILURES}
    kinds = Counter(
        "known failure" if key_of(c) in known else found[key_of(c)]["outcome"] for c in cells() if key_of(c) in found
    )
    minutes = sum(row["seconds"] for row in found.values()) / 60
    counts = f"{kinds['right']} right, {kinds['refused']} refused, {kinds['known failure']} known failures"
    lines = [INTRODUCTION, f"{sum(kinds.values())} cells: {counts}; {minutes:.0f} minutes of one core.", ""]
    for family in FAMILIES:
        lines += [f"## {family.capitalize()}", "", *table(family, found)]
    lines += refusals(found)
    if KNOWN_FAILURES:
        lines += ["## Known failures", ""]
        lines += [f"- {way}, {problem}: {cause}" for (way, problem), cause in KNOWN_FAILURES.items()]
        lines.append("")
    PAGE.write_text("\n".join(lines))
