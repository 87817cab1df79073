"""Runs the scripts whose output and figures the site shows: docs/figures/<name>.txt and
<name>*.png.

Each script runs in its own folder. Its output is kept as it is, with the command before
it and machine and versions after it. Figures are made small. Scripts that read a data
folder find it by NUMPYRO_BNN_DATA.

    python docs/make_examples.py                # all
    python docs/make_examples.py demo           # some
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
WIDTH, COLOURS = 1100, 96  # of a figure on a page
PACKAGES = ("numpyro_bnn", "jax", "numpyro", "arviz")

# Script -> options. Empty: the defaults. Otherwise small sizes, a few minutes each.
RUNS = {
    "demo": "",
    "tabular": "",
    "probabilistic_backpropagation": "",
    "variational": "--num-steps 5000 --num-warmup 500",
    "infinite_width": "--widths 8 32 128 --networks 1000 --trained 8 --steps 100"
    " --nuts-warmup 100 --nuts-samples 100",
    "minibatch": "--width 20 --num-samples 50 --steps-per-draw 50 --nuts-rows 200"
    " --nuts-warmup 100 --num-chains 2 --test-rows 500",
    "ensembles": (
        "--sets energy --members 4 --num-warmup 150 --num-samples 100 --nuts-warmup "
        "200 --max-tree-depth 7"
    ),
    "symmetries": (
        "--nets bn --width 10 --num-warmup 100 --num-samples 150 --max-tree-depth 5"
    ),
    "neal": "--num-warmup 60 --num-samples 100 --num-chains 2 --max-tree-depth 6",
    "two_modes": "--num-warmup 100 --num-samples 300 --kept-draws 200 --num-chains 2 "
    "--num-moves 50"
    " --max-tree-depth 5",
    "last_layer": "",
    "active_learning": "",
    "bayesian_optimization": "--seeds 3",
    "lotka_volterra": "",
    "nnx_module": "",
    "unknown_digits": "",
    "groups": "",
    "image_classification": (
        "--num-epochs 1 --num-draws 10 --rounds 1 --test-images 1000"
    ),
    "image_chains": (
        "--methods network ensemble SGHMC --num-epochs 20 --chain-epochs 40 --members "
        "6 --chains 3"
    ),
}


def command_of(name: str) -> str:
    """The command that a reader types.

    >>> command_of("demo")
    'python -m examples.demo'
    """
    return f"python -m examples.{name} {RUNS[name]}".strip()


def run(name: str, folder: str) -> tuple[str, float]:
    """The output of the script, and its seconds."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    env["XDG_CACHE_HOME"] = folder  # the seconds are those of a first run
    command = [sys.executable, *command_of(name).split()[1:]]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout, time.perf_counter() - began


def shrink(source: Path | BytesIO, target: Path | BytesIO) -> None:
    """A figure of the width of a page, with few colors."""
    from PIL import Image

    image = Image.open(source).convert("RGB")
    if image.width > WIDTH:
        image = image.resize(
            (WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS
        )
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(target, "png", optimize=True)


def make(name: str) -> None:
    """Run one script, and save the output and figures for its page."""
    with tempfile.TemporaryDirectory() as folder:
        printed, seconds = run(name, folder)
        for old in FIGURES.glob(f"{name}*.png"):
            old.unlink()
        for figure in sorted((Path(folder) / "output").glob("*.png")):
            shrink(figure, FIGURES / figure.name)
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    machine = (
        f"{platform.system()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}; {versions}"
    )
    text = (
        f"$ {command_of(name)}\n{printed.strip()}\n\n{seconds:.0f} seconds. "
        f"{machine}.\n"
    )
    (FIGURES / f"{name}.txt").write_text(text)


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(RUNS))
    if unknown:
        sys.exit(
            f"no script of these names: {', '.join(unknown)}. Known: {', '.join(RUNS)}."
        )
    FIGURES.mkdir(exist_ok=True)
    for name in names or RUNS:
        print(command_of(name), flush=True)
        make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
