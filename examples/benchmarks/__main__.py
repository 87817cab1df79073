"""Run all measurements: every figure of the docs, from one command.

    python -m examples.benchmarks                        what there is
    python -m examples.benchmarks uci --sets boston      one, with options (--help)
    python -m examples.benchmarks all --data FOLDER      all, as the docs have them

`all` takes hours. It can be interrupted: a file NAME.done marks a finished measurement,
which is not run again, and those that continue resume within their files.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from examples.shared import writable_folder


class Measurement(NamedTuple):
    """A script, and how the docs run it.

    :param module: of `examples`.
    :param output: name of the file or folder that is written.
    :param options: further ones.
    :param data: it reads the data folder.
    :param continues: it finds out what is left to do.
    """

    module: str
    output: str
    options: str = ""
    data: bool = True
    continues: bool = False


def _json(name: str, options: str = "", **more: bool) -> Measurement:
    return Measurement(f"benchmarks.{name}", f"{name}.json", options, **more)


# Short ones first.
MEASUREMENTS = {
    "gradient_cost": _json("gradient_cost", "--docs docs/speed.md", data=False),
    "sgld_step": _json("sgld_step", "--docs docs/speed.md", data=False),
    "orbit_moves": _json("orbit_moves", "--docs docs/speed.md", data=False),
    "coupling_step": _json("coupling_step", "--docs docs/speed.md", data=False),
    "compilation": _json("compilation", "--docs docs/speed.md", data=False),
    "first_draw": _json("first_draw", "--docs docs/speed.md", data=False),
    "collapse_cost": _json("collapse_cost", data=False),
    "runs": _json("runs", data=False),
    "scale": _json("scale", "--docs docs/scale.md", data=False),
    "sources": _json("sources", "--docs docs/scale.md", data=False, continues=True),
    "minibatches": _json(
        "minibatches", "--docs docs/tables/minibatches.md", data=False, continues=True
    ),
    "minibatch_defaults": _json(
        "minibatch_defaults",
        "--docs docs/tables/minibatches.md",
        data=False,
        continues=True,
    ),
    "gauntlet": _json(
        "gauntlet", "--docs docs/choosing.md", data=False, continues=True
    ),
    "gradient_variance": _json("gradient_variance", data=False),
    "adf_speed": _json("adf_speed", "--docs docs/tables/adf.md"),
    "laplace_torch": _json("laplace_torch", "ours", data=False),
    "infinite_kernel": _json(
        "infinite_kernel", "--docs docs/tables/infinite.md", data=False
    ),
    "horseshoe": _json("horseshoe", data=False),
    "blackjax_ess": _json(
        "blackjax_ess", "--docs docs/tables/microcanonical.md", continues=True
    ),
    "california": Measurement("probabilistic_backpropagation", "california"),
    "adf_uci": _json("adf_uci", "--docs docs/tables/adf.md"),
    "hierarchical_hmc": _json(
        "hierarchical_hmc",
        (
            "--docs docs/tables/hierarchical.md --num-chains 2 --num-warmup 500 "
            "--num-samples "
            "1000"
        ),
    ),
    "rdata": Measurement("two_modes", "rdata", "--docs docs/tables/hierarchical.md"),
    "microcanonical": _json("microcanonical", "--docs docs/tables/microcanonical.md"),
    "function_agreement": _json(
        "function_agreement", "--docs docs/tables/microcanonical.md"
    ),
    "mixing": _json("mixing", "--docs docs/tables/hierarchical.md", continues=True),
    "infinite_uci": _json("infinite_uci", "--docs docs/tables/infinite.md"),
    "variational_uci": _json("variational_uci", "--docs docs/tables/guides.md"),
    "laplace_uci": _json("laplace_uci"),
    "laplace_naval": _json(
        "laplace_uci",
        (
            "--docs docs/tables/guides.md --sets naval --widths 16 16 16 --rounds 1 "
            "--steps "
            "1000 --splits 1"
        ),
    ),
    "estimators": _json("estimators", "--docs docs/tables/estimators.md"),
    "estimators_rows": Measurement(
        "benchmarks.estimators",
        "estimators_rows.json",
        "--docs docs/tables/estimators.md --rows 60 150 --splits 1 --effort 0.5",
    ),
    "classification": _json(
        "classification", "--docs docs/tables/estimators.md", data=False
    ),
    "tables": _json(
        "tables",
        "--docs docs/tables/real_tables.md --figure docs/figures/tables.png",
        data=False,
        continues=True,
    ),
    "fashion": Measurement(
        "image_classification", "fashion", "--docs docs/tables/images.md"
    ),
    "image_chains": Measurement(
        "image_chains",
        "image_chains",
        (
            "--docs docs/tables/images.md --net residual --num-epochs 20 "
            "--chain-epochs 6 "
            "--chains 4 --learning-rate 3e-3"
        ),
        continues=True,
    ),
    "gpu": _json("gpu", continues=True),
    "uci": Measurement(
        "benchmarks.uci",
        "uci.jsonl",
        "--docs docs/tables/uci.md --figure docs/figures/uci.png",
        continues=True,
    ),
}


def overview() -> str:
    """A line for each measurement: its name and the first sentence of its script."""
    width = max(map(len, MEASUREMENTS))
    lines = []
    for name, found in MEASUREMENTS.items():
        about = importlib.import_module(f"examples.{found.module}").__doc__ or ""
        lines.append(f"{name:{width}}  {about.strip().splitlines()[0]}")
    return "\n".join(lines)


def command(name: str, folder: Path, data: str | None) -> list[str]:
    """The command that `all` runs for a measurement."""
    found = MEASUREMENTS[name]
    words = [
        "-m",
        f"examples.{found.module}",
        "--output",
        str(folder / found.output),
        *found.options.split(),
    ]
    return [sys.executable, *words, *(["--data", data] if found.data and data else [])]


def run_all(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks all",
        description="All of them, as the docs have them.",
    )
    parser.add_argument(
        "--data",
        default=os.environ.get("NUMPYRO_BNN_DATA"),
        help="folder of the data sets",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/evidence"),
        help="folder of the JSON files",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands only"
    )
    args = parser.parse_args(argv)
    if args.data is None and not args.dry_run:
        parser.error(
            "--data: the figures of the docs need real data; name its folder, or set "
            "NUMPYRO_BNN_DATA"
        )
    folder, failed = writable_folder(args.output), []
    for name, found in MEASUREMENTS.items():
        words = command(name, folder, args.data)
        mark = folder / f"{name}.done"
        if mark.exists() and not found.continues:
            print(f"{name}: done", flush=True)
            continue
        print(f"{name}: {' '.join(['python', *words[1:]])}", flush=True)
        if args.dry_run:
            continue
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
        else:
            mark.touch()
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return bool(failed)


def main(argv: list[str] | None = None) -> object:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n{overview()}")
        return 0
    name, *rest = argv
    if name == "all":
        return run_all(rest)
    if name not in MEASUREMENTS:
        names = ", ".join([*MEASUREMENTS, "all"])
        print(
            f"examples.benchmarks: no measurement {name!r}; there are {names}",
            file=sys.stderr,
        )
        return 2
    importlib.import_module(f"examples.{MEASUREMENTS[name].module}").main(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
