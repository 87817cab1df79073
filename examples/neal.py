"""Neal's examples with hierarchical priors: two classes of two inputs, and three
classes with irrelevant inputs.

Priors, networks and data of the examples of Radford Neal's software for flexible
Bayesian modeling. Each group of weights has its own precision. On cdata each input has
one (automatic relevance determination), and the posterior shows that two of the four
inputs are irrelevant. The tables are read from a data folder. Without one, the script
simulates small sets of the same kind.

    python -m examples.neal --data FOLDER
    python -m examples.neal --help
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples import loaders
from examples.shared import at_least, writable_folder

# The output of Neal's software for networks on the same training and test cases
# (bout.net and cout.net of his ex-netgp): average log probability of the test targets
# and error rate, each with its standard error.
NEAL = {
    "bdata": ((-0.237, 0.017), (0.104, 0.0097)),
    "cdata": ((-0.472, 0.023), (0.198, 0.0126)),
}
KERNEL = "net/Dense_0.kernel"
GRID = np.stack(np.meshgrid(np.linspace(-3.2, 3.2, 41), np.linspace(-3.2, 3.2, 41)), -1)


class Fit(NamedTuple):
    """Finished chains, draws (C, S, ...) of the scales 1 / sqrt(precision) by site, and
    the report.
    """

    mcmc: Any
    scales: dict[str, np.ndarray]
    report: dict[str, Any]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.neal",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, default=None, help="data folder with extra/neal_fbm.npz"
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="examples to run"
    )
    parser.add_argument(
        "--num-warmup", type=int, default=400, help="warm-up transitions per chain"
    )
    parser.add_argument("--num-samples", type=int, default=600, help="draws per chain")
    parser.add_argument("--num-chains", type=int, default=4, help="chains, vectorized")
    parser.add_argument("--max-tree-depth", type=int, default=10, help="of NUTS")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of starts and draws, and of simulated data",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of JSON and figures"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("num_warmup", "num_chains", "max_tree_depth"))
    at_least(parser, args, ("num_samples",), 4)  # R-hat and ESS need as many
    return args


def made_up(name: str, seed: int) -> Any:
    """A set of the same kind and size of inputs as Neal's, with 200 training and 400
    test points.
    """
    from examples.loaders import Dataset

    rng = np.random.default_rng(seed)
    size, cut = 600, 200
    if name == "rdata":
        x = rng.normal(size=(size, 1))
        y = (
            np.tanh(2 * x[:, 0])
            + 0.3 * np.cos(4 * x[:, 0])
            + 0.1 * rng.normal(size=size)
        )
    elif name == "bdata":
        x = rng.normal(size=(size, 2))
        inside = 1.0 / (1.0 + np.exp(-5 * (0.9 - np.hypot(x[:, 0], x[:, 1]))))
        y = (rng.uniform(size=size) < inside).astype(np.int32)
    else:
        x = rng.uniform(-1, 1, (size, 4))
        noisy = x[:, :2] + 0.1 * rng.normal(size=(size, 2))
        y = np.where(
            np.hypot(*noisy.T) < 0.6, 0, np.where(noisy.sum(1) > 0, 1, 2)
        ).astype(np.int32)
    return Dataset(x[:cut], y[:cut], x[cut:], y[cut:], f"made-up {name}")


def load_data(name: str, args: argparse.Namespace) -> Any:

    if args.data is None and not os.environ.get("NUMPYRO_BNN_DATA"):
        print(f"no data folder: a made-up set of the kind of {name} instead")
        return made_up(name, args.seed)
    return loaders.load_neal(name, args.data)


def ard(name: str, shape: tuple[int, ...]) -> Any:
    """Neal's ``x0.2:0.5:1``: a precision for each input, and a shared one above them.

    tau ~ Gamma(0.25) with mean 1 / width^2, tau_i ~ Gamma(0.5) with mean tau, w_ij ~
    N(0, 1 / tau_i). Weights into a unit are then Cauchy given tau, and such weights his
    software scales by their number: width = 0.2 / D.
    """
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    width = 0.2 / shape[0]
    shared = numpyro.sample(
        f"{name}_shared_precision", dist.Gamma(0.25, 0.25 * width**2)
    )
    each = dist.Gamma(0.5, 0.5 / shared).expand(shape[:1]).to_event(1)
    precision = numpyro.sample(f"{name}_precision", each)
    return dist.Normal(jnp.zeros(shape), precision[:, None] ** -0.5).to_event(2)


def make_model(name: str) -> Callable:
    """The networks of his commands, with the priors written above each.

    Weights are non-centered, which is the default of the package. We measured two
    chains of 300 draws after 300 on cdata; the worst log scale of an input had R-hat
    1.02 and ESS 101, in 55 processor seconds. Centered weights gave 1.18, 4 and 56 with
    NUTS; with a `Gibbs` of `PrecisionGibbs` and NUTS, 1.18, 16 and 65. Even if a scale
    is drawn exactly, it cannot move far while its weights are fixed. The result on
    bdata was similar: ESS 71, and 5 with Gibbs.
    """
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.reparam import LocScaleReparam

    import numpyro_bnn as bnn
    from numpyro_bnn import priors

    vague = priors.GammaPrecision(0.05, 0.5)
    if name == "cdata":  # 4 8 3 / ih=x0.2:0.5:1 bh=0.05:0.5 ho=x0.05:0.5 bo=0.05:0.5
        net = bnn.nn.MLP([8, 3], "tanh")
        centered = bnn.models.classification(
            net, 3, {"Dense_0.kernel": ard, "*": vague}
        )
        return numpyro.handlers.reparam(centered, {KERNEL: LocScaleReparam(0)})

    prior = {  # 2 15 1 / ih=0.05:0.5 bh=0.05:0.5 ho=x0.05:0.5 bo=100
        "Dense_0.*": priors.GammaPrecision(0.05, 0.5, fan_in_scaling=False),
        "Dense_1.kernel": vague,
        "Dense_1.bias": priors.Normal(bias_scale=100.0),
    }

    def model(x, y=None):
        f = bnn.random_network("net", bnn.nn.MLP([15, 1], "tanh"), x.shape[1:], prior)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=f(x)[..., 0]), obs=y)

    return model


def sample(model: Callable, data: Any, args: argparse.Namespace) -> Fit:
    """NUTS on a model that is not centered."""
    import jax
    from numpyro.diagnostics import summary
    from numpyro.infer import MCMC, NUTS

    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.9, max_tree_depth=args.max_tree_depth),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(
        jax.random.key(args.seed),
        data.x_train,
        data.y_train,
        extra_fields=("diverging", "num_steps"),
    )
    draws = jax.device_get(mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - start
    precisions = {
        name: value for name, value in draws.items() if name.endswith("precision")
    }
    scales = {
        name.replace("precision", "scale"): value**-0.5
        for name, value in precisions.items()
    }
    fields = mcmc.get_extra_fields()
    report = {
        "data": repr(data),
        "seconds": seconds,
        "divergences": int(fields["diverging"].sum()),
        "gradients_per_draw": float(fields["num_steps"].mean()),
    }
    for name, row in summary(
        {name: np.log(value) for name, value in scales.items()}
    ).items():
        report[f"log {name}"] = {
            key: np.asarray(row[key], float).tolist() for key in ("n_eff", "r_hat")
        }
    return Fit(mcmc, scales, report)


def probabilities(fit: Fit, x: np.ndarray) -> np.ndarray:
    """Draws (C, S, N, K) of the probabilities of the classes at ``x``."""
    import numpyro_bnn as bnn

    found = bnn.to_inference_data(
        fit.mcmc, predictions={"x": x}, log_likelihood=False, posterior_predictive=False
    )["predictions"]
    if "y_probs" in found:
        return np.asarray(found["y_probs"], float)
    one = np.asarray(found["y_mean"], float)
    return np.stack([1 - one, one], -1)


def score(probs: np.ndarray, data: Any, report: dict[str, Any]) -> None:
    """Log probability of the test labels and share of wrong guesses, for each chain and
    all chains; also printed.
    """
    from numpyro_bnn import metrics

    mixing = metrics.function_space(probs[:, :, :100, 0])  # 100 points are enough
    report["function"] = {"r_hat": mixing.max_rhat, "ess": mixing.min_ess}
    print(
        f"\n{data}\n{len(probs)} chains of {probs.shape[1]} draws: "
        f"{report['seconds']:.0f} seconds,"
        f" {report['gradients_per_draw']:.0f} gradients a draw, "
        f"{report['divergences']} divergences;"
        f" test probabilities: R-hat {mixing.max_rhat:.3f}, ESS {mixing.min_ess:.0f}"
    )
    report["test"] = {}
    for name, draws in [(f"chain {i + 1}", chain) for i, chain in enumerate(probs)] + [
        ("all chains", probs)
    ]:
        of_label, right = (
            metrics.log_score(draws, data.y_test),
            metrics.accuracy(draws, data.y_test),
        )
        scores = (
            (of_label.value, of_label.standard_error),
            (1 - right.value, right.standard_error),
        )
        report["test"][name] = {"log_probability": scores[0], "error": scores[1]}
        print_scores(name, *scores)
    if data.name in NEAL:  # his own cases, not simulated ones
        print_scores("Neal's run", *NEAL[data.name])


def print_scores(
    name: str, log_probability: tuple[float, float], error: tuple[float, float]
) -> None:
    numbers = ("{:7.3f} ± {:.3f}".format(*pair) for pair in (log_probability, error))
    print("{:12} log probability {}   wrong guesses {}".format(name, *numbers))


def bdata(args: argparse.Namespace) -> dict[str, Any]:
    """Two classes: test scores, and a figure of the probability over the plane."""
    data = load_data("bdata", args)
    fit = sample(make_model("bdata"), data, args)
    at_test, on_grid = np.split(
        probabilities(fit, np.concatenate([data.x_test, GRID.reshape(-1, 2)])),
        [len(data.x_test)],
        axis=2,
    )
    score(at_test, data, fit.report)
    surface = on_grid[..., 1].reshape(-1, *GRID.shape[:2])
    draw_surface(surface.mean(0), surface.std(0), data, args.output / "neal_bdata.png")
    return fit.report


def cdata(args: argparse.Namespace) -> dict[str, Any]:
    """Three classes: test scores, and how large the weights of each input are."""
    data = load_data("cdata", args)
    fit = sample(make_model("cdata"), data, args)
    score(probabilities(fit, data.x_test), data, fit.report)
    scales, mixing = fit.scales[f"{KERNEL}_scale"], fit.report[f"log {KERNEL}_scale"]
    intervals, medians = (
        np.quantile(scales, (0.5, 0.05, 0.95), axis=(0, 1)).T,
        np.median(scales, axis=1),
    )
    ratios = medians[:, :2].min(1) / medians[:, 2:].max(
        1
    )  # the first two inputs decide the class
    fit.report.update(
        {
            "scales": intervals.tolist(),
            "medians": medians.tolist(),
            "ratios": ratios.tolist(),
        }
    )
    print(
        "scale of the weights of an input: median, 90 % interval, medians by chain, "
        "R-hat and ESS of its log"
    )
    for i, (middle, low, high) in enumerate(intervals):
        by_chain = " ".join(f"{value:.3f}" for value in medians[:, i])
        print(
            f"input {i + 1} {middle:8.3f}  [{low:.4f}, {high:.3f}]   {by_chain}"
            f"   {mixing['r_hat'][i]:.3f} {mixing['n_eff'][i]:5.0f}"
        )
    print(
        "smallest relevant / largest irrelevant median, by chain: "
        + " ".join(f"{r:.1f}" for r in ratios)
    )
    draw_scales(scales, args.output / "neal_cdata.png")
    return fit.report


SETS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "bdata": bdata,
    "cdata": cdata,
}


def draw_surface(mean: np.ndarray, sd: np.ndarray, data: Any, path: Path) -> None:
    """Probability of class 1 with the training cases, and its posterior sd, each with
    the line of even odds.
    """
    figure, (left, right) = new_figure(2, (9.6, 4.2))
    x, y = np.moveaxis(GRID, -1, 0)
    for axis, values, levels, colors, title in (
        (left, mean, np.linspace(0, 1, 11), "RdBu_r", "probability of class 1"),
        (right, sd, 10, "viridis", "its posterior sd"),
    ):
        figure.colorbar(axis.contourf(x, y, values, levels, cmap=colors), ax=axis)
        axis.contour(
            x,
            y,
            mean,
            [0.5],
            colors="black" if axis is left else "white",
            linewidths=1.5,
        )
        axis.set(title=title, xlabel="input 1", ylabel="input 2", aspect="equal")
    for label, color in enumerate(("white", "black")):
        points = data.x_train[data.y_train == label]
        left.scatter(
            *points.T,
            s=14,
            color=color,
            edgecolor="black",
            linewidth=0.5,
            label=f"class {label}",
        )
    left.set(xlim=(GRID.min(), GRID.max()), ylim=(GRID.min(), GRID.max()))
    left.legend(loc="lower left", fontsize="small")
    save_figure(figure, path)


def draw_scales(scales: np.ndarray, path: Path) -> None:
    """Posterior intervals of the scale of each input, with the chains side by side."""
    figure, (axis,) = new_figure(1, (5.6, 3.8))
    for chain, draws in enumerate(scales):
        low, middle, high = np.quantile(draws, (0.05, 0.5, 0.95), axis=0)
        place = np.arange(draws.shape[1]) + 0.5 * ((chain + 0.5) / len(scales) - 0.5)
        axis.errorbar(
            place,
            middle,
            [middle - low, high - middle],
            fmt="o",
            label=f"chain {chain + 1}",
        )
    names = [
        f"input {i + 1}\n{'relevant' if i < 2 else 'irrelevant'}"
        for i in range(scales.shape[-1])
    ]
    axis.set_xticks(range(len(names)), names)
    axis.set(
        yscale="log",
        ylabel="scale of the weights",
        title="median and 90 % interval, by chain",
    )
    axis.legend()
    save_figure(figure, path)


def new_figure(columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, columns, figsize=size, layout="constrained", squeeze=False
    )
    return figure, axes[0]


def save_figure(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=200)
    plt.close(figure)
    print(f"written: {path}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    folder = writable_folder(args.output)
    report = {name: SETS[name](args) for name in args.sets}
    path = folder / "neal.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")
    return report


if __name__ == "__main__":
    main()
