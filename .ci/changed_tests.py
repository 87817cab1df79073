"""Print the test files of the modules that differ from a base commit: python .ci/changed_tests.py origin/main

Here a module is a folder or file of the package; its tests are ``tests/test_<module>*.py``. If the base is missing or
is this commit, the list is empty.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Modules whose tests have another name.
TESTS = {"guides/adf": "adf", "networks.py": "networks", "models.py": "models"}


def changed_files(base: str) -> list[str]:
    """Files that differ between the base and this commit, since they diverged."""
    command = ["git", "diff", "--name-only", f"{base}...HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def tests_of(path: str) -> set[str]:
    """Names of the test files that hold the tests of one changed file."""
    if path.startswith("tests/test_"):
        return {Path(path).name}
    room = path.removeprefix("numpyro_bnn/")
    if room == path or room.startswith("_"):
        return set()
    prefix = next((name for start, name in TESTS.items() if room.startswith(start)), room.split("/")[0])
    return {file.name for file in (ROOT / "tests").glob(f"test_{prefix}*.py")}


def main() -> None:
    """Print the files, in order."""
    names = set().union(*map(tests_of, changed_files(sys.argv[1])))
    print(" ".join(f"tests/{name}" for name in sorted(names) if (ROOT / "tests" / name).is_file()))


if __name__ == "__main__":
    main()
