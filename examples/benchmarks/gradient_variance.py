"""Variance and cost of gradients of the evidence lower bound: one draw, ten draws,
flipout, local reparameterization.

The variance is that of the gradient for one minibatch, summed over the parameters of a
mean-field guide of a network with two hidden layers. The time of a step of each
estimator (gradient and Adam) is compared with a step of the same network with ordinary
weights, interleaved in the same run. Writes JSON.

    python -m examples.benchmarks.gradient_variance --output
    output/gradient_variance.json
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_bnn as bnn
from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    options_of,
    repeated,
    wall_clock,
    write_report,
)
from examples.shared import at_least, writable_file
from numpyro_bnn import guides, nn

ESTIMATORS = {
    "one draw": Trace_ELBO(),
    "one draw, exact divergence": TraceMeanField_ELBO(),
    "ten draws": Trace_ELBO(num_particles=10),
    "flipout": guides.TraceFlipout_ELBO(),
    "local reparameterization": guides.TraceLocalReparam_ELBO(),
}
ROWS, INPUTS = 10_000, 10


def make_mlp(width: int) -> nn.Layer:
    return nn.MLP([width, width, 1], "relu")


def make_cnn(width: int) -> nn.Layer:
    layers = [
        nn.Conv2d(width, 5, padding="VALID"),
        nn.Activation("relu"),
        nn.MaxPool(2),
        nn.Flatten(),
        nn.Dense(10),
    ]
    return nn.Sequential(layers)


def make_model(net: nn.Layer) -> Callable:
    """Regression for vectors, classification for images."""

    def model(x, y):
        network = bnn.random_network("net", net, x.shape[1:], bnn.priors.Normal())
        with numpyro.plate("data", ROWS, subsample_size=len(x)):
            out = network(x)
            fn = (
                dist.Categorical(logits=out)
                if x.ndim == 4
                else dist.Normal(out[..., 0], 0.5)
            )
            numpyro.sample("y", fn, obs=y)

    return model


def make_rows(shape: tuple[int, ...], seed: int = 0):
    x = random.normal(random.key(seed), shape)
    first = x.reshape(len(x), -1)[:, 0]
    return x, (first > 0).astype(int) if len(shape) == 4 else jnp.sin(2 * first)


def fit(model: Callable, data: tuple, steps: int) -> tuple:
    """A mean-field guide after some steps: variances at a random start are not those of
    training.
    """
    guide = guides.AutoMeanField(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), guides.TraceFlipout_ELBO())
    return guide, svi.run(random.key(0), steps, *data, progress_bar=False).params


def measure_variance(batch_size: int, width: int, draws: int, steps: int) -> dict:
    """Summed variance of the gradient by estimator, and as a fraction of that of one
    draw.
    """
    data, model = make_rows((batch_size, INPUTS)), make_model(make_mlp(width))
    guide, params = fit(model, data, steps)
    row: dict = {"batch_size": batch_size, "variance": {}, "ratio": {}}
    for name, elbo in ESTIMATORS.items():

        def gradient(_, key, elbo=elbo):
            loss = jax.grad(lambda p: elbo.loss(key, p, model, guide, *data) / ROWS)
            return None, ravel_pytree(loss(params))[0]

        values = jax.jit(lambda keys, g=gradient: jax.lax.scan(g, None, keys)[1])(
            random.split(random.key(1), draws)
        )
        row["variance"][name] = float(np.asarray(values, np.float64).var(0).sum())
        row["ratio"][name] = row["variance"][name] / row["variance"]["one draw"]
    return row


def deterministic_step(
    net: nn.Layer, data: tuple, optimizer
) -> tuple[Callable, object]:
    x, y = data
    shapes = net.param_shapes(x.shape[1:])
    weights = {
        k: 0.05 * random.normal(random.key(i), s)
        for i, (k, s) in enumerate(shapes.items())
    }

    def loss(weights):
        out = net.apply(weights, x)
        fn = (
            dist.Categorical(logits=out)
            if x.ndim == 4
            else dist.Normal(out[..., 0], 0.5)
        )
        return -fn.log_prob(y).mean()

    def step(state):
        return optimizer.update(jax.grad(loss)(optimizer.get_params(state)), state)

    return step, optimizer.init(weights)


def measure_steps(
    name: str, net: nn.Layer, data: tuple, rounds: int, calls: int
) -> dict:
    """Time and counted operations of a step of every estimator, relative to the
    deterministic network.
    """
    model, optimizer = make_model(net), numpyro.optim.Adam(1e-3)
    steps = {"deterministic": deterministic_step(net, data, optimizer)}
    svi = SVI(model, guides.AutoMeanField(model), optimizer, Trace_ELBO())
    start = svi.init(random.key(0), *data)
    for label, elbo in ESTIMATORS.items():
        if label != "ten draws":
            other = copy.copy(svi)
            other.loss = elbo
            steps[label] = (lambda state, svi=other: svi.update(state, *data)[0]), start
    compiled = {
        label: jax.jit(step).lower(state).compile()
        for label, (step, state) in steps.items()
    }
    contenders = {
        label: (repeated(step, steps[label][1], calls), calls)
        for label, step in compiled.items()
    }
    times = wall_clock(interleave(contenders, rounds))
    flops = {label: step.cost_analysis()["flops"] for label, step in compiled.items()}
    return {
        "network": name,
        "milliseconds": {
            label: 1e-3 * statistics.median(t) for label, t in times.items()
        },
        "time_ratio": {
            label: median_ratio(times, label, "deterministic") for label in times
        },
        "flops_ratio": {
            label: count / flops["deterministic"] for label, count in flops.items()
        },
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/gradient_variance.json"),
        help="JSON file",
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--width", type=int, default=50, help="hidden units")
    parser.add_argument(
        "--draws", type=int, default=500, help="gradients per estimator"
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="steps of training before"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=15,
        help="interleaved rounds of timing; the median counts",
    )
    parser.add_argument("--calls", type=int, default=5, help="steps per round")
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=["mlp", "cnn"],
        default=["mlp", "cnn"],
        help="to be timed",
    )
    parser.add_argument(
        "--channels",
        type=int,
        default=64,
        help="filters of the convolution that is timed",
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("draws",), 2)
    at_least(parser, args, ("steps", "rounds", "calls", "width", "channels"))
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    writable_file(args.output)
    variances = []
    for batch_size in args.batch_sizes:
        variances.append(
            measure_variance(batch_size, args.width, args.draws, args.steps)
        )
        ratios = "  ".join(
            f"{name} {value:.3f}" for name, value in variances[-1]["ratio"].items()
        )
        print(f"variance, B={batch_size}: {ratios}")
    nets = {
        "mlp": (make_mlp(args.width), make_rows((128, INPUTS))),
        "cnn": (make_cnn(args.channels), make_rows((128, 28, 28, 1))),
    }
    steps = []
    for name in args.networks:
        steps.append(measure_steps(name, *nets[name], args.rounds, args.calls))
        ratios = "  ".join(
            f"{label} {value:.2f}" for label, value in steps[-1]["time_ratio"].items()
        )
        print(f"time of a step, {name}: {ratios}")
    report = {
        "variance": variances,
        "steps": steps,
        **environment([]),
        "options": options_of(args),
    }
    write_report(args.output, report)
    return report


if __name__ == "__main__":
    main()
