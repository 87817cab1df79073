"""Finite networks compared with their infinitely wide limit: prior draws, tangent
kernels in training, posteriors.

Wide networks drawn from the prior become a Gaussian process (a, b). The tangent kernel
of a network moves less in training the wider it is (c). On a small data set NUTS on a
network agrees with exact regression by the process (d).

    python -m examples.infinite_width --help
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from examples.shared import at_least, writable_folder

NOISE_SD = 0.1


class Width(NamedTuple):
    """Measurements at one width, relative to the limit or to the start.

    :param kurtosis: E f^4 / K^2 - 3 over networks, 0 for a process.
    :param squared: mean squared relative distance of one network's covariance from the
        kernel.
    :param tangent: median relative distance of one network's tangent kernel from its
        limit.
    :param change: median relative change of that kernel in training.
    """

    width: int
    kurtosis: float
    squared: float
    tangent: float
    change: float


class Report(NamedTuple):
    """Measurements by width, and the largest distance between the posterior means over
    the posterior sd.
    """

    widths: list[Width]
    distance: float


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.infinite_width",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[16, 32, 64, 128, 256],
        help="units of hidden layers",
    )
    parser.add_argument(
        "--networks", type=int, default=5_000, help="networks drawn at each width"
    )
    parser.add_argument(
        "--trained", type=int, default=15, help="networks trained at each width"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of gradient descent"
    )
    parser.add_argument(
        "--nuts-width",
        type=int,
        default=50,
        help="units of the network that NUTS samples",
    )
    parser.add_argument(
        "--nuts-warmup", type=int, default=300, help="warm-up transitions of NUTS"
    )
    parser.add_argument("--nuts-samples", type=int, default=300, help="draws of NUTS")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of the figure"
    )
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        (
            "widths",
            "networks",
            "trained",
            "steps",
            "nuts_width",
            "nuts_warmup",
            "nuts_samples",
        ),
    )
    return args


def network(width: int) -> Any:
    from numpyro_bnn import nn

    return nn.MLP([width, width, 1], "erf")


def prior() -> Any:
    from numpyro_bnn import priors

    return priors.Normal(2.0, bias_scale=0.5)


def draw(net: Any, key: jax.Array, inputs: int) -> dict[str, jax.Array]:
    """Parameters from the prior."""
    shapes = net.param_shapes((inputs,))
    keys = jax.random.split(key, len(shapes))
    return {
        name: prior()(name, shape).expand(shape).sample(k)
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }


def hidden_covariance(width: int, x: jax.Array, key: jax.Array) -> jax.Array:
    """Covariance of the outputs of one network given its hidden layers: s^2 mean h h' +
    b^2.
    """
    from numpyro_bnn import nn

    body = nn.Sequential(network(width).layers[:-1])
    h = body.apply(draw(body, key, x.shape[1]), x)
    return prior().scale ** 2 * h @ h.T / width + prior().bias_scale ** 2


def draw_networks(
    args: argparse.Namespace, width: int, kernel: np.ndarray, x: jax.Array
) -> tuple[float, float]:
    """Excess kurtosis of the outputs, and the squared distance of their covariances
    from the kernel.
    """
    keys = jax.random.split(
        jax.random.fold_in(jax.random.key(args.seed), width), args.networks
    )
    one = jax.jit(
        lambda keys: jax.lax.map(
            lambda k: hidden_covariance(width, x, k), keys, batch_size=500
        )
    )
    found = np.asarray(one(keys), np.float64)
    own, limit = np.diagonal(found, axis1=1, axis2=2), np.diagonal(kernel)
    kurtosis = 3 * np.mean(
        own**2 / limit**2 - 1
    )  # given the hidden layers an output is normal
    squared = (
        np.mean(np.linalg.norm(found - kernel, axis=(1, 2)) ** 2)
        / np.linalg.norm(kernel) ** 2
    )
    return float(kurtosis), float(squared)


def train_networks(
    args: argparse.Namespace, width: int, x: jax.Array, y: jax.Array
) -> tuple[float, float]:
    """Distance of the tangent kernel from its limit before training, and its change in
    training.
    """
    from numpyro_bnn import infinite

    net = network(width)
    limit = np.asarray(infinite.ntk(net, x, prior=prior()))
    rate = 0.5 / float(np.linalg.eigvalsh(limit)[-1])
    variance = {
        name: jnp.asarray(prior()(name, shape).scale) ** 2
        for name, shape in net.param_shapes((1,)).items()
    }

    def step(params: dict, _: None) -> tuple[dict, None]:
        slopes = jax.grad(lambda p: 0.5 * jnp.sum((net.apply(p, x)[:, 0] - y) ** 2))(
            params
        )
        return {
            name: params[name] - rate * variance[name] * slopes[name] for name in params
        }, None

    trained = jax.jit(lambda params: jax.lax.scan(step, params, None, args.steps)[0])
    apart, moved = [], []
    for key in jax.random.split(jax.random.key(args.seed + width), args.trained):
        start = draw(net, key, 1)
        before = infinite.empirical_ntk(net, start, x, prior=prior())
        after = infinite.empirical_ntk(net, trained(start), x, prior=prior())
        apart.append(np.linalg.norm(before - limit) / np.linalg.norm(limit))
        moved.append(np.linalg.norm(after - before) / np.linalg.norm(before))
    return float(np.median(apart)), float(np.median(moved))


def generate(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Twenty noisy values of a sine, with a gap in the middle."""
    rng = np.random.default_rng(seed)
    x = np.sort(np.concatenate([rng.uniform(-2, -0.6, 10), rng.uniform(0.4, 2, 10)]))[
        :, None
    ]
    return x, np.sin(2.5 * x[:, 0]) + NOISE_SD * rng.normal(size=20)


def sample(
    args: argparse.Namespace, x: np.ndarray, y: np.ndarray, grid: np.ndarray
) -> np.ndarray:
    """Draws of the function of a finite network by NUTS."""
    from numpyro.infer import MCMC, NUTS

    from numpyro_bnn import random_network

    def model(x: jax.Array, y: jax.Array) -> None:
        f = random_network("net", network(args.nuts_width), (1,), prior())
        numpyro.deterministic("f", f(jnp.asarray(grid, jnp.float32))[:, 0])
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(f(x)[:, 0], NOISE_SD), obs=y)

    mcmc = MCMC(
        NUTS(model, max_tree_depth=7),
        num_warmup=args.nuts_warmup,
        num_samples=args.nuts_samples,
        progress_bar=False,
    )
    mcmc.run(
        jax.random.key(args.seed),
        jnp.asarray(x, jnp.float32),
        jnp.asarray(y, jnp.float32),
    )
    return np.asarray(mcmc.get_samples()["f"])


def measure(args: argparse.Namespace) -> list[Width]:
    from numpyro_bnn import infinite

    angles = np.linspace(0, 2.5, 4)
    points = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], 1), jnp.float32)
    kernel = np.asarray(infinite.nngp(network(1), points, prior=prior()), np.float64)
    x, y = (jnp.asarray(part[::2], jnp.float32) for part in generate(args.seed))
    rows = []
    print(
        f"{'width':>6}{'kurtosis':>10}{'squared':>10}{'tangent':>9}{'change':>9}{'seconds':>9}"
    )
    for width in args.widths:
        start = time.perf_counter()
        row = Width(
            width,
            *draw_networks(args, width, kernel, points),
            *train_networks(args, width, x, y),
        )
        rows.append(row)
        seconds = time.perf_counter() - start
        print(
            f"{width:6}{row.kurtosis:10.4f}{row.squared:10.4f}{row.tangent:9.4f}{row.change:9.4f}{seconds:9.1f}"
        )
    return rows


def draw_figure(
    args: argparse.Namespace,
    rows: list[Width],
    data: tuple,
    grid: np.ndarray,
    gp: Any,
    draws: np.ndarray,
) -> Path:
    """Four panels, in colors that color-blind readers can distinguish."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = {
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    with plt.rc_context(settings):
        figure, axes = plt.subplots(2, 2, figsize=(7.0, 5.4), layout="constrained")
        _prior_draws(axes[0, 0], args, grid)
        _rates(
            axes[0, 1],
            rows,
            {
                "kurtosis": "excess kurtosis of outputs",
                "squared": "squared distance of covariances",
            },
            -1,
        )
        axes[0, 1].set_ylabel("distance from the process")
        _rates(
            axes[1, 0],
            rows,
            {
                "tangent": "from its limit, at the start",
                "change": "from the start, by training",
            },
            -0.5,
        )
        axes[1, 0].set_ylabel("relative distance of the tangent kernel")
        _posteriors(axes[1, 1], data, grid, gp, draws, args.nuts_width)
        for axis, letter in zip(axes.ravel(), "abcd", strict=True):
            axis.set_title(letter, loc="left", fontweight="bold", fontsize=9)
        path = args.output / "infinite_width.png"
        figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def _prior_draws(axis: Any, args: argparse.Namespace, grid: np.ndarray) -> None:
    """Functions of the widest network over the band of the process."""
    from numpyro_bnn import infinite

    net = network(max(args.widths))
    sd = np.sqrt(
        np.diagonal(infinite.nngp(net, grid.astype(np.float32), prior=prior()))
    )
    axis.fill_between(
        grid[:, 0],
        -1.96 * sd,
        1.96 * sd,
        color="#56B4E9",
        alpha=0.3,
        lw=0,
        label="95 % of the process",
    )
    for i, key in enumerate(jax.random.split(jax.random.key(args.seed), 6)):
        f = net.apply(draw(net, key, 1), jnp.asarray(grid, jnp.float32))[:, 0]
        axis.plot(
            grid[:, 0],
            f,
            color="#0072B2",
            lw=0.8,
            label=f"networks of width {max(args.widths)}" if i == 0 else None,
        )
    axis.set_ylim(-6, 8)
    axis.set_xlabel("x")
    axis.set_ylabel("f(x) under the prior")
    axis.legend(loc="upper left")


def _rates(axis: Any, rows: list[Width], names: dict[str, str], slope: float) -> None:
    """Measurements against width, and lines of the rates that theory gives."""
    widths = np.array([row.width for row in rows], float)
    for (name, label), color, marker in zip(
        names.items(), ("#0072B2", "#D55E00"), "os", strict=True
    ):
        values = np.array([getattr(row, name) for row in rows])
        axis.loglog(widths, values, marker, color=color, markersize=4, label=label)
        guide = np.exp(np.mean(np.log(values) - slope * np.log(widths))) * widths**slope
        axis.loglog(widths, guide, "-", color=color, lw=0.7)
    axis.plot([], [], color="black", lw=0.7, label=f"width$^{{{slope:g}}}$")
    axis.set_xlabel("width")
    axis.set_xticks(widths, [f"{w:g}" for w in widths])
    axis.minorticks_off()
    axis.set_ylim(
        bottom=10 ** np.floor(np.log10(axis.get_ylim()[0] / 2))
    )  # a decade to read, and room
    axis.legend(loc="lower left")


def _posteriors(
    axis: Any, data: tuple, grid: np.ndarray, gp: Any, draws: np.ndarray, width: int
) -> None:
    """Bands for the process, lines for the network."""
    mean, variance = gp.predict(grid, diagonal=True)
    sd = np.sqrt(variance)
    axis.fill_between(
        grid[:, 0],
        mean - 1.96 * sd,
        mean + 1.96 * sd,
        color="#56B4E9",
        alpha=0.35,
        lw=0,
        label="process, 95 %",
    )
    axis.plot(grid[:, 0], mean, color="#0072B2", lw=1.2, label="process, mean")
    axis.plot(
        grid[:, 0],
        draws.mean(0),
        color="#D55E00",
        lw=1.0,
        ls="--",
        label=f"NUTS, width {width}, mean",
    )
    for bound in np.quantile(draws, [0.025, 0.975], axis=0):
        axis.plot(grid[:, 0], bound, color="#D55E00", lw=0.7, ls=":")
    axis.plot(data[0][:, 0], data[1], "k.", markersize=4, label="data")
    axis.set_xlabel("x")
    axis.set_ylabel("f(x) given the data")
    axis.set_ylim(top=axis.get_ylim()[1] + 1.6)
    axis.legend(
        loc="upper right", ncols=2, columnspacing=1.0, handlelength=1.5, fontsize=7
    )


def main(argv: list[str] | None = None) -> Report:
    args = parse(argv)
    writable_folder(args.output)
    from numpyro_bnn import infinite

    rows = measure(args)
    x, y = generate(args.seed)
    grid = np.linspace(-3, 3, 121)[:, None]
    gp = infinite.gp_regression(
        network(args.nuts_width), x, y, noise_sd=NOISE_SD, prior=prior()
    )
    start = time.perf_counter()
    draws = sample(args, x, y, grid)
    mean, variance = gp.predict(grid, diagonal=True)
    distance = float(np.max(np.abs(draws.mean(0) - mean) / np.sqrt(variance)))
    print(
        f"NUTS took {time.perf_counter() - start:.1f} s; log evidence of the process "
        f"{gp.log_marginal_likelihood:.1f}"
    )
    print(f"posterior means are at most {distance:.2f} posterior sds apart")
    print(f"written: {draw_figure(args, rows, (x, y), grid, gp, draws)}")
    return Report(rows, distance)


if __name__ == "__main__":
    main()
