"""The page of the docs that shows the table: ways across, problems down."""

from collections import Counter
from collections.abc import Mapping

from truth.cells import FAMILIES_OF, GROUPS, KNOWN_FAILURES, ROOT, cells
from truth.problems import FAMILIES

PAGE = ROOT / "docs" / "what_works.md"
MARKS = {"right": "✓", "refused": "–", "known failure": "✗"}
INTRODUCTION = """\
# What works with what

Every mark below is a test. A model whose posterior is known, by quadrature in NumPy, meets a way to sample, approximate
or export it:

- **✓** the answer is right. Chains that start at the posterior keep its moments, within five standard errors of 2,048
  independent chains (kernels with a known bias also within .03 posterior standard deviations, `MCLMC` .05). The evidence
  by importance weights of a guide agrees with the integral, and its bound lies below. Densities and exported log
  likelihoods agree to rounding. `AutoADF` agrees with dense moment matching.
- **–** the package refuses before any work, with an error that says what to write instead.
- **✗** a known failure, explained below the tables.
- Empty: not tested together, because the way does not apply to the model.

`make truth` measures all of it again and writes this page; the models are in `tests/truth/problems.py`.
"""  # noqa: E501


def tables(family: str, kinds: Mapping[str, str]) -> list[str]:
    """The tables of one family of problems, one per group of ways."""
    lines = []
    names = [problem.name for problem in FAMILIES[family]]
    for group, ways in GROUPS.items():
        marks = {
            (c.way, c.problem): MARKS.get(kinds.get(c.key, ""), "?")
            for c in cells(group)
            if c.problem in names
        }
        columns = [
            way
            for way in ways
            if family in FAMILIES_OF[way] and any(w == way for w, _ in marks)
        ]
        if columns:
            lines += [
                f"### {family.capitalize()}: {group}",
                "",
                f"| | {' | '.join(columns)} |",
            ]
            lines += [f"| --- |{' :-: |' * len(columns)}"]
            lines += [
                f"| {n} | {' | '.join(marks.get((way, n), '') for way in columns)} |"
                for n in names
            ]
            lines.append("")
    return lines


def refusals(found: Mapping[str, Mapping]) -> list[str]:
    """The messages of the refused cells, with the models they are about."""
    about: dict[tuple[str, str], list[str]] = {}
    for cell in cells():
        row = found.get(cell.key, {})
        if row.get("outcome") == "refused":
            about.setdefault((cell.way, row["text"]), []).append(cell.problem)
    lines = [
        "## What is refused, and why",
        "",
        "| way | models | message |",
        "| --- | --- | --- |",
    ]
    for (way, text), problems in about.items():
        message = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {way} | {', '.join(problems)} | {message} |")
    return [*lines, ""]


def write_page(found: Mapping[str, Mapping]) -> None:
    """Write the page from the outcomes."""
    kinds = {
        key: "known failure" if key in KNOWN_FAILURES else row["outcome"]
        for key, row in found.items()
    }
    minutes = sum(row["seconds"] for row in found.values()) / 60
    counts = Counter(kinds.values())
    shown = ", ".join(
        f"{counts[kind]} {kind}{'s' * (kind == 'known failure')}" for kind in MARKS
    )
    lines = [
        INTRODUCTION,
        f"{len(found)} cells: {shown}; {minutes:.0f} minutes of one core.",
        "",
    ]
    for family in FAMILIES:
        lines += [f"## {family.capitalize()}", "", *tables(family, kinds)]
    lines += [*refusals(found), "## Known failures", ""]
    lines += [
        f"- {key.replace(' | ', ', ')}: {cause}"
        for key, cause in KNOWN_FAILURES.items()
    ]
    PAGE.write_text("\n".join([*lines, ""]))
