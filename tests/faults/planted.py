"""The list of planted faults: one changed line each, and the tests that notice it."""

import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).resolve().parent / "lists"


class Fault(NamedTuple):
    """One fault of a file of the package.

    :param file: path from the root of the project.
    :param sound: text of the file that the fault replaces; it occurs there exactly once.
    :param fault: what stands there instead.
    :param tests: tests as pytest names them, or whole files; at least one fails with the fault.
    :param why: in words, what is wrong then.
    """

    file: str
    sound: str
    fault: str
    tests: tuple[str, ...]
    why: str

    def planted_in(self, text: str) -> str:
        """The text of the file with the fault."""
        if text.count(self.sound) != 1:
            raise ValueError(f"{self.file} has {text.count(self.sound)} times: {self.sound}")
        return text.replace(self.sound, self.fault)


def read_faults() -> list[Fault]:
    """All faults, in the order of the lists: one list per module."""
    rows = [row for path in sorted(FOLDER.glob("*.toml")) for row in tomllib.loads(path.read_text())["faults"]]
    return [Fault(row["file"], row["sound"], row["fault"], tuple(row["tests"]), row["why"]) for row in rows]
