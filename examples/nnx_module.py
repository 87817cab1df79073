"""A Flax NNX module that somebody else wrote, made Bayesian in five lines.

The module is a plain residual network. Once it is trained by optax as usual, and once
its weights get priors and are sampled. Both predict held-out patients of scikit-learn's
diabetes data, in random splits. Without a network, linear regression is hard to beat on
these data, so its figures are printed beside them.

    python -m examples.nnx_module --help
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import nnx
from numpyro.contrib.module import random_nnx_module
from numpyro.infer import MCMC
from scipy.stats import norm

import numpyro_bnn as bnn
from examples import loaders
from examples.shared import at_least, early_stopped, markdown, writable_folder

# --------------------------------------------------------------------------------------
# somebody's module


class Residual(nnx.Module):
    """Two layers, and a way around them; it knows nothing of NumPyro."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.inner, self.outer = (
            nnx.Linear(width, width, rngs=rngs),
            nnx.Linear(width, width, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.outer(nnx.silu(self.inner(x)))


class Network(nnx.Module):
    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs) -> None:
        self.enter, self.block = (
            nnx.Linear(inputs, width, rngs=rngs),
            Residual(width, rngs),
        )
        self.leave = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.leave(nnx.silu(self.block(self.enter(x))))[..., 0]


# -----------------------------------------------------------------------------------
# the five lines, and optax


def model(x: jax.Array, y: jax.Array | None = None, width: int = 16) -> None:
    net = random_nnx_module(
        "net", Network(x.shape[1], width, nnx.Rngs(0)), prior=bnn.priors.Hierarchical()
    )
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x), sigma), obs=y)


def sampled(data: Any, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Means and sds (M, N) of the test rows, by draw."""
    kernel = bnn.infer.MCLMC(model, steps_per_draw=args.steps_per_draw)
    numbers = {
        "num_warmup": args.num_warmup,
        "num_samples": args.num_samples,
        "num_chains": args.num_chains,
    }
    mcmc = MCMC(kernel, chain_method="vectorized", progress_bar=False, **numbers)
    mcmc.run(jax.random.key(args.seed), data.x_train, data.y_train, width=args.width)
    test = bnn.to_inference_data(
        mcmc,
        predictions={"x": data.x_test},
        log_likelihood=False,
        posterior_predictive=False,
    )
    means = test["predictions"]["y_mean"].to_numpy().reshape(-1, len(data.x_test))
    return means, np.broadcast_to(
        test["posterior"]["sigma"].to_numpy().reshape(-1, 1), means.shape
    )


def trained(data: Any, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """The same for one network, stopped where a tenth of the rows are predicted best,
    whose errors give the sd.
    """
    net = Network(data.x_train.shape[1], args.width, nnx.Rngs(args.seed))
    held = len(data.x_train) // 10
    x, y = (jnp.asarray(part) for part in (data.x_train, data.y_train))
    graph, params = nnx.split(net)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    parts = (
        (lambda params: loss(params, x[held:], y[held:])),
        (lambda params: loss(params, x[:held], y[:held])),
    )
    best, least = jax.jit(
        lambda start: early_stopped(
            *parts, start, optax.adam(0.003), args.optimizer_steps
        )
    )(params)
    mean = np.asarray(nnx.merge(graph, best)(jnp.asarray(data.x_test)))[None]
    return mean, np.full_like(mean, np.sqrt(least))


def linear(data: Any, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Least squares."""
    design, new = (
        np.c_[part, np.ones(len(part))] for part in (data.x_train, data.x_test)
    )
    weights = np.linalg.lstsq(design, data.y_train, rcond=None)[0]
    sd = np.sqrt(
        np.sum((data.y_train - design @ weights) ** 2) / (len(design) - design.shape[1])
    )
    mean = (new @ weights)[None]
    return mean, np.full_like(mean, sd)


WAYS = {"Bayesian": sampled, "trained by optax": trained, "least squares": linear}


# --------------------------------------------------------------------------------------
# script


def scores(means: np.ndarray, sds: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Of the mixture over draws, in units of the standardized targets."""
    rmse = np.sqrt(np.mean((means.mean(0) - y) ** 2))
    density = np.log(np.mean(norm.pdf(y, means, sds), axis=0))
    return {"rmse": float(rmse), "log_likelihood": float(density.mean())}


def draw_figure(path: Path, found: dict[str, dict[str, list[float]]]) -> None:
    """The log likelihood of each split, both ways."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(4.2, 4), layout="constrained")
    x, y = (
        np.array(found[way]["log_likelihood"])
        for way in ("trained by optax", "Bayesian")
    )
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    ax.plot(ends, ends, color="0.6", lw=1)
    ax.plot(x, y, "o")
    ax.set(
        xlabel="log likelihood, trained by optax",
        ylabel="Bayesian",
        aspect="equal",
        title="one point per split",
    )
    figure.savefig(path, dpi=200)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.nnx_module",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--splits", type=int, default=10, help="random splits")
    parser.add_argument("--width", type=int, default=16, help="units of the module")
    parser.add_argument(
        "--optimizer-steps", type=int, default=2000, help="steps of Adam"
    )
    parser.add_argument(
        "--num-warmup", type=int, default=200, help="warm-up transitions per chain"
    )
    parser.add_argument("--num-samples", type=int, default=200, help="draws per chain")
    parser.add_argument("--num-chains", type=int, default=4, help="chains")
    parser.add_argument(
        "--steps-per-draw", type=int, default=50, help="gradients per draw"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of the table as JSON and the figure",
    )
    args = parser.parse_args(argv)
    numbers = (
        "width",
        "optimizer_steps",
        "num_warmup",
        "num_samples",
        "num_chains",
        "steps_per_draw",
    )
    at_least(parser, args, numbers)
    at_least(parser, args, ("splits",), 2)
    return args


def main(argv: list[str] | None = None) -> dict[str, dict[str, list[float]]]:
    args = parse(argv)
    folder = writable_folder(args.output)
    found: dict[str, dict[str, list[float]]] = {
        way: {"rmse": [], "log_likelihood": []} for way in WAYS
    }
    for split in range(args.splits):
        data = loaders.standardize(
            loaders.load_sklearn("diabetes", seed=args.seed + split)
        )
        for way, predict in WAYS.items():
            for name, value in scores(*predict(data, args), data.y_test).items():
                found[way][name].append(value)
    rows = []
    for way, by_name in found.items():
        cells = [
            f"{np.mean(v):.3f} ± {np.std(v, ddof=1) / len(v) ** 0.5:.3f}"
            for v in by_name.values()
        ]
        gain = np.subtract(
            by_name["log_likelihood"], found["trained by optax"]["log_likelihood"]
        )
        cells.append(
            f"{gain.mean():+.3f} ± {gain.std(ddof=1) / len(gain) ** 0.5:.3f}"
            if way != "trained by optax"
            else ""
        )
        rows.append((way, *cells))
    print(f"diabetes, {args.splits} splits, standardized targets")
    print(markdown(("way", "RMSE", "log likelihood", "better than optax by"), rows))
    (folder / "nnx_module.json").write_text(json.dumps(found, indent=1) + "\n")
    draw_figure(folder / "nnx_module.png", found)
    return found


if __name__ == "__main__":
    main()
