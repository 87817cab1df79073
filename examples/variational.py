"""How confident is a network between its data? Mean field, coupling flow and NUTS on
one small data set.

The data are two clusters of points on a line with a gap between them. In the gap
variational guides are too confident (for mean field see Foong et al. 2019), even those
with a better evidence bound. NUTS is the reference. The script prints that bound,
Pareto k, the log score of held-out points, and the sd of the function in the gap and at
the data.

    python -m examples.variational --help
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.shared import at_least, writable_folder

NOISE = 0.1
GAP = (-0.45, 0.35)  # where there is no data, a margin inside the clusters' ends
ENDS = (-1.3, 1.3)


class Row(NamedTuple):
    """One line of the table; ``None`` where a method has no such number."""

    method: str
    elbo: float | None
    elbo_se: float | None
    pareto_k: float | None
    log_score: float
    gap_sd: float
    data_sd: float
    sd_distance: float
    seconds: float


class Data(NamedTuple):
    """Training and test points of the two clusters, and a grid over all."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    grid: np.ndarray


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.variational",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=20, help="hidden units")
    parser.add_argument(
        "--activation", default="tanh", help="activation of the hidden units"
    )
    parser.add_argument(
        "--points", type=int, default=60, help="training points, half in each cluster"
    )
    parser.add_argument(
        "--num-steps", type=int, default=20_000, help="steps of the optimizer"
    )
    parser.add_argument("--num-particles", type=int, default=8, help="draws per step")
    parser.add_argument(
        "--num-warmup",
        type=int,
        default=1000,
        help="warm-up transitions of NUTS per chain",
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=1000,
        help="draws of NUTS per chain, and of each guide",
    )
    parser.add_argument("--num-chains", type=int, default=2, help="chains of NUTS")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of data, starts and draws"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of the figure"
    )
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        (
            "width",
            "num_steps",
            "num_particles",
            "num_warmup",
            "num_samples",
            "num_chains",
        ),
    )
    at_least(parser, args, ("points",), 4)
    return args


def make_data(args: argparse.Namespace) -> Data:
    rng = np.random.default_rng(args.seed)

    def clusters(size: int) -> tuple[np.ndarray, np.ndarray]:
        left, right = (
            rng.uniform(-1.0, -0.6, size // 2),
            rng.uniform(0.5, 1.0, size - size // 2),
        )
        x = np.concatenate([left, right])[:, None]
        return x, np.cos(4 * x[:, 0] + 0.8) + NOISE * rng.normal(size=size)

    return Data(
        *clusters(args.points), *clusters(400), np.linspace(*ENDS, 161)[:, None]
    )


def make_model(args: argparse.Namespace) -> Callable:
    """One hidden layer, unit prior scales as in a limit of infinite
    width, known noise.
    """
    import numpyro_bnn as bnn

    net = bnn.nn.MLP([args.width, 1], args.activation)
    return bnn.models.regression(
        net, bnn.priors.Normal(3.0, bias_scale=3.0), noise=NOISE
    )


def fit_guide(
    guide: Any, data: Data, args: argparse.Namespace
) -> tuple[Any, Any, float]:
    """Parameters of the guide, its evidence, and seconds."""
    import jax
    import optax
    from numpyro.infer import SVI, Trace_ELBO

    from numpyro_bnn import guides

    rate = optax.cosine_decay_schedule(0.01, args.num_steps)
    svi = SVI(
        guide.model,
        guide,
        optax.adam(rate),
        Trace_ELBO(num_particles=args.num_particles),
    )
    start = time.perf_counter()
    fit = guides.fit(svi, jax.random.key(args.seed), args.num_steps, data.x, data.y)
    jax.block_until_ready(fit.params)
    seconds = time.perf_counter() - start
    judged = guides.evidence(
        guide, fit.params, data.x, data.y, rng_key=jax.random.key(args.seed + 1)
    )
    return fit, judged, seconds


def run_nuts(
    model: Callable, data: Data, args: argparse.Namespace
) -> tuple[Any, float]:
    import jax
    from numpyro.infer import MCMC, NUTS

    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.9),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(args.seed), data.x, data.y)
    jax.block_until_ready(mcmc.last_state)
    return mcmc, time.perf_counter() - start


def predict(
    result: Any,
    data: Data,
    x: np.ndarray,
    y: np.ndarray | None,
    args: argparse.Namespace,
    **of: Any,
) -> Any:
    """Predictions at ``x`` as ArviZ results; a guide needs the arguments it was fitted
    with.
    """
    import numpyro_bnn as bnn

    if of:
        of |= {"args": (data.x, data.y), "num_samples": args.num_samples}
    return bnn.to_inference_data(result, predictions={"x": x, "y": y}, **of)


def function_sd(idata: Any) -> np.ndarray:
    return np.asarray(idata["predictions"]["y_mean"].std(("chain", "draw")))


def between(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return (x[:, 0] > low) & (x[:, 0] < high)


def compare(data: Data, args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Rows of the table, and predictions on the grid by method."""
    from numpyro_bnn import guides, metrics

    model = make_model(args)
    fits: dict[str, tuple[Any, dict, Any, float]] = {}
    for name, guide in (
        ("mean field", guides.AutoMeanField(model)),
        ("full rank", guides.AutoBlocks(model, {"*": guides.FullRank()})),
        ("coupling flow", guides.AutoCoupling(model)),
    ):
        fit, judged, seconds = fit_guide(guide, data, args)
        fits[name] = fit, {"guide": guide}, judged, seconds
    mcmc, seconds = run_nuts(model, data, args)
    fits["NUTS"] = mcmc, {}, None, seconds
    on_grid = {
        name: predict(fit, data, data.grid, None, args, **of)
        for name, (fit, of, *_) in fits.items()
    }
    sds = {name: function_sd(idata) for name, idata in on_grid.items()}
    gap = between(data.grid, *GAP)
    seen = between(data.grid, -1.0, -0.6) | between(data.grid, 0.5, 1.0)
    rows = []
    for name, (fit, of, judged, seconds) in fits.items():
        held_out = predict(fit, data, data.x_test, data.y_test, args, **of)[
            "predictions"
        ]
        rows.append(
            Row(
                method=name,
                elbo=judged and judged.elbo,
                elbo_se=judged and judged.elbo_se,
                pareto_k=judged and judged.pareto_k,
                log_score=metrics.lppd(held_out["y_log_likelihood"]).value,
                gap_sd=float(sds[name][gap].mean()),
                data_sd=float(sds[name][seen].mean()),
                sd_distance=float(np.sqrt(np.mean((sds[name] - sds["NUTS"]) ** 2))),
                seconds=seconds,
            )
        )
    return rows, on_grid


def print_table(rows: list[Row]) -> None:
    print(
        "\nsd of the function: mean over the gap, mean where data are, RMS distance to "
        "that of NUTS on the grid"
    )
    print(
        f"{'':16}{'ELBO':>16}{'Pareto k':>10}{'log score':>11}{'gap':>8}"
        f"{'data':>8}{'distance':>10}{'seconds':>9}"
    )
    for row in rows:
        elbo = "-" if row.elbo is None else f"{row.elbo:.2f} ± {row.elbo_se:.2f}"
        k = "-" if row.pareto_k is None else f"{row.pareto_k:.2f}"
        print(
            f"{row.method:16}{elbo:>16}{k:>10}{row.log_score:11.3f}{row.gap_sd:8.3f}{row.data_sd:8.3f}"
            f"{row.sd_distance:10.3f}{row.seconds:9.1f}"
        )


def draw_plot(on_grid: dict[str, Any], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from numpyro_bnn import plots

    size = (3.4 * len(on_grid), 3.4)
    figure, axes = plt.subplots(
        1, len(on_grid), figsize=size, sharey=True, layout="constrained", squeeze=False
    )
    for axis, (name, idata) in zip(axes[0], on_grid.items(), strict=True):
        plots.predictive_band(
            idata, ax=axis, xlabel="x", ylabel="y" if axis is axes[0, 0] else ""
        )
        axis.get_legend().remove()
        axis.set_title(name)
        axis.set_ylim(-4, 4)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    path = folder / "variational.png"
    figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def main(argv: list[str] | None = None) -> list[Row]:
    args = parse(argv)
    folder = writable_folder(args.output)
    data = make_data(args)
    print(
        f"{args.points} points in two clusters, network 1-{args.width}-1 "
        f"({args.activation}), noise sd {NOISE}"
    )
    rows, on_grid = compare(data, args)
    print_table(rows)
    print(f"written: {draw_plot(on_grid, folder)}")
    return rows


if __name__ == "__main__":
    main()
