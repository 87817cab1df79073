"""Pool-based active learning: which row to measure next, beside a random choice.

A regressor learns from a few rows, and asks for the target of the row whose function it
knows least (its epistemic variance), one after the other. Beside it, rows are asked for
at random. Both start from the same rows.

    python -m examples.active_learning --data FOLDER
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples import loaders
from examples.shared import at_least, markdown, writable_folder

WAYS = ("uncertain", "random")


def learn(
    way: str, data: Any, order: np.ndarray, args: argparse.Namespace
) -> list[float]:
    """Test RMSE after each round; ``order`` is a random order of the rows."""
    from numpyro_bnn.estimators import Regressor

    known, pool = list(order[: args.start]), list(order[args.start :])
    errors = []
    for _ in range(args.rounds + 1):
        options = {
            "widths": (args.width,),
            "effort": args.effort,
            "random_state": args.seed,
        }
        model = Regressor("laplace", **options).fit(
            data.x_train[known], data.y_train[known]
        )
        errors.append(
            float(np.sqrt(np.mean((model.predict(data.x_test) - data.y_test) ** 2)))
        )
        chosen = (
            model.most_uncertain(data.x_train[pool], args.batch)
            if way == "uncertain"
            else range(args.batch)
        )
        asked = [pool[i] for i in chosen]
        known, pool = known + asked, [row for row in pool if row not in asked]
    return errors


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.active_learning",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of the UCI data ; otherwise NUMPYRO_BNN_DATA, or diabetes",
    )
    parser.add_argument("--set", default="yacht", help="a UCI set")
    parser.add_argument(
        "--seeds",
        type=int,
        default=10,
        help="repetitions, with other rows at the start",
    )
    parser.add_argument("--start", type=int, default=16, help="rows at the start")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of asking")
    parser.add_argument(
        "--batch", type=int, default=3, help="rows asked for in a round"
    )
    parser.add_argument("--width", type=int, default=10, help="hidden units")
    parser.add_argument("--effort", type=float, default=0.3, help="of the estimator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of JSON and figure"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("seeds", "start"), 2)
    at_least(parser, args, ("rounds", "batch", "width"))
    return args


def draw_figure(path: Path, labels: np.ndarray, errors: dict[str, np.ndarray]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
    for way, values in errors.items():
        mean, error = values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5
        ax.fill_between(labels, mean - error, mean + error, alpha=0.3, lw=0)
        ax.plot(labels, mean, "o-", ms=3, label=way)
    ax.set(xlabel="known rows", ylabel="test RMSE", yscale="log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.legend()
    figure.savefig(path, dpi=200)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    folder = writable_folder(args.output)
    compiled: list[float] = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, s, **_: compiled.append(s) if name == event else 0
    )
    found_data = args.data or os.environ.get("NUMPYRO_BNN_DATA")
    data = (
        loaders.load_uci(args.set, 0, args.data)
        if found_data
        else loaders.load_sklearn("diabetes")
    )
    errors: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    programs = []
    for seed in range(args.seeds):
        order = np.random.default_rng(args.seed + seed).permutation(len(data.x_train))
        for way in WAYS:
            before = len(compiled)
            errors[way].append(learn(way, data, order, args))
            programs.append(len(compiled) - before)
    found = {way: np.array(values) for way, values in errors.items()}
    labels = args.start + args.batch * np.arange(args.rounds + 1)
    gains = found["random"] - found["uncertain"]
    rows = []
    for i, number in enumerate(labels):
        columns = (found["random"][:, i], found["uncertain"][:, i], gains[:, i])
        rows.append(
            (
                number,
                *(
                    f"{c.mean():.3f} ± {c.std(ddof=1) / len(c) ** 0.5:.3f}"
                    for c in columns
                ),
            )
        )
    print(f"{data.name}, {args.seeds} seeds: test RMSE")
    print(markdown(("known rows", "random", "most uncertain", "difference"), rows))
    print(
        f"programs compiled: {programs[0]} in the first run, {sum(programs[2:])} in "
        f"the last {len(programs) - 2}"
    )
    report = {
        "labels": labels.tolist(),
        "programs": programs,
        **{way: values.tolist() for way, values in found.items()},
    }
    (folder / "active_learning.json").write_text(json.dumps(report, indent=1) + "\n")
    draw_figure(folder / "active_learning.png", labels, found)
    return report


if __name__ == "__main__":
    main()
