"""A random last layer on a pretrained body, compared with the pretrained network and
with everything random.

Small digits of scikit-learn. Optax pretrains a small network. Then its body is held
fixed (``priors.Fixed``) and the last layer is sampled, with NUTS and with MCLMC, from
the posterior given all data. Or all weights are sampled with MCLMC, with means of zero
or around the pretrained values (``priors.Centered``).

    python -m examples.last_layer --help
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples import loaders
from examples.shared import at_least, writable_folder

CLASSES = 10


class Row(NamedTuple):
    """One line of the table; the scores are of the test digits, the seconds without
    those of the pretraining.
    """

    method: str
    random_weights: int
    accuracy: float
    log_score: float
    calibration_error: float
    ess: float | None
    seconds: float


class Data(NamedTuple):
    """Pixels from 0 to 1, and labels."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.last_layer",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--width",
        type=int,
        default=20,
        help="hidden units of the last hidden layer; the first has 2x",
    )
    parser.add_argument(
        "--train-rows",
        type=int,
        default=400,
        help="training digits; the test set has 898",
    )
    parser.add_argument(
        "--num-steps", type=int, default=300, help="steps of the pretraining"
    )
    parser.add_argument(
        "--num-warmup", type=int, default=200, help="warm-up transitions per chain"
    )
    parser.add_argument("--num-samples", type=int, default=200, help="draws per chain")
    parser.add_argument("--num-chains", type=int, default=2, help="chains")
    parser.add_argument(
        "--max-tree-depth", type=int, default=7, help="NUTS takes at most 2^depth steps"
    )
    parser.add_argument(
        "--steps-per-draw", type=int, default=50, help="steps of MCLMC per draw"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the split, the network and the draws",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of the table as JSON and the figure",
    )
    args = parser.parse_args(argv)
    positive = (
        "width",
        "num_steps",
        "num_warmup",
        "num_samples",
        "num_chains",
        "max_tree_depth",
        "steps_per_draw",
    )
    at_least(parser, args, positive)
    at_least(parser, args, ("train_rows",), CLASSES)
    return args


def load_data(args: argparse.Namespace) -> Data:
    data = loaders.load_sklearn("digits", test_fraction=0.5, seed=args.seed)
    pixels = [np.asarray(part, np.float32) / 16 for part in (data.x_train, data.x_test)]
    rows = slice(args.train_rows)
    return Data(pixels[0][rows], data.y_train[rows], pixels[1], data.y_test)


def pretrain(net: Any, data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """Fit all weights by AdamW: the loop over ``step`` is what any network needs."""
    import jax
    import optax

    def loss(params: dict[str, Any]) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(
            net.apply(params, data.x), data.y
        ).mean()

    optimizer = optax.adamw(0.01)
    params = net.init(jax.random.key(args.seed), data.x.shape[1:])

    @jax.jit
    def step(params: dict[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
        update, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, update), state

    state = optimizer.init(params)
    for _ in range(args.num_steps):
        params, state = step(params, state)
    return params


class Result(NamedTuple):
    """The scores of a method, and its reliability curve."""

    row: Row
    curve: Any


def scores(
    method: str,
    random_weights: int,
    probs: Any,
    data: Data,
    seconds: float,
    ess: float | None = None,
) -> Result:
    from numpyro_bnn import metrics

    value = (
        metrics.accuracy(probs, data.y_test).value,
        metrics.log_score(probs, data.y_test).value,
    )
    curve = metrics.ece(probs, data.y_test, bins=8)
    return Result(
        Row(
            method,
            random_weights,
            *value,
            metrics.ece(probs, data.y_test).ece,
            ess,
            seconds,
        ),
        curve,
    )


def sample(
    method: str,
    make: Callable,
    net: Any,
    prior: Any,
    data: Data,
    args: argparse.Namespace,
) -> Result:
    """Sample the weights that are random under the prior, and predict the
    test digits.
    """
    import jax
    from numpyro.infer import MCMC

    import numpyro_bnn as bnn

    start = time.perf_counter()
    model = bnn.models.classification(net, CLASSES, prior)
    options = {
        "num_warmup": args.num_warmup,
        "num_samples": args.num_samples,
        "num_chains": args.num_chains,
    }
    mcmc = MCMC(make(model), chain_method="vectorized", progress_bar=False, **options)
    mcmc.run(jax.random.key(args.seed), data.x, data.y)
    jax.block_until_ready(mcmc.last_state)
    seconds = time.perf_counter() - start
    idata = bnn.to_inference_data(
        mcmc, {"x": data.x_test}, posterior_predictive=False, log_likelihood=False
    )
    probs = idata["predictions"]["y_probs"].to_numpy()
    weights = sum(
        int(np.prod(value.shape[2:]))
        for name, value in idata["posterior"].items()
        if name.startswith("net.")
    )
    ess = bnn.metrics.function_space(probs).min_ess
    return scores(method, weights, probs, data, seconds, ess)


def compare(data: Data, args: argparse.Namespace) -> list[Result]:
    from functools import partial

    import jax
    from numpyro.infer import NUTS

    from numpyro_bnn import infer, nn, priors

    net = nn.MLP([2 * args.width, args.width, CLASSES], "tanh")
    start = time.perf_counter()
    params = pretrain(net, data, args)
    probs = np.asarray(jax.nn.softmax(net.apply(params, data.x_test)), np.float64)
    found = [
        scores(
            "pretrained, no weight random",
            0,
            probs / probs.sum(1, keepdims=True),
            data,
            0.0,
        )
    ]
    print(f"pretrained in {time.perf_counter() - start:.1f} seconds", flush=True)

    last = {"Dense_2.*": priors.Normal(6.0), "*": priors.Fixed(params)}
    nuts = partial(NUTS, max_tree_depth=args.max_tree_depth)
    mclmc = partial(infer.MCLMC, steps_per_draw=args.steps_per_draw)
    ways = {
        "last layer random, NUTS": (nuts, last),
        "last layer random, MCLMC": (mclmc, last),
        "all random, MCLMC": (mclmc, priors.Normal(6.0)),
        "all around pretrained, MCLMC": (mclmc, priors.Centered(params, 1.0)),
    }
    for method, (make, prior) in ways.items():
        found.append(sample(method, make, net, prior, data, args))
        print(f"{method}: {found[-1].row.seconds:.1f} seconds", flush=True)
    return found


def print_table(rows: list[Row], data: Data) -> None:
    print(
        f"\n{len(data.y)} training and {len(data.y_test)} test digits; ESS: the worst "
        f"of the predicted probabilities"
    )
    print(
        f"{'':30}{'random':>8}{'accuracy':>10}{'log score':>11}"
        f"{'ECE':>8}{'ESS':>7}{'seconds':>9}"
    )
    for row in rows:
        ess = "-" if row.ess is None else f"{row.ess:.0f}"
        print(
            f"{row.method:30}{row.random_weights:8}{row.accuracy:10.3f}{row.log_score:11.3f}"
            f"{row.calibration_error:8.3f}{ess:>7}{row.seconds:9.1f}"
        )


def draw_plot(found: list[Result], folder: Path) -> Path:
    """Accuracy against the probability of the predicted class, by bins of that
    probability.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
    ax.plot([0, 1], [0, 1], color="0.7", lw=1)
    for result in found:
        some = result.curve.counts >= 5
        ax.plot(
            result.curve.confidence[some],
            result.curve.accuracy[some],
            "o-",
            ms=3,
            lw=1,
            label=result.row.method,
        )
    ax.set(xlabel="probability of the predicted class", ylabel="accuracy")
    ax.legend(fontsize=7)
    path = folder / "last_layer.png"
    figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def main(argv: list[str] | None = None) -> list[Row]:
    args = parse(argv)
    folder = writable_folder(args.output)
    data = load_data(args)
    found = compare(data, args)
    rows = [result.row for result in found]
    print_table(rows, data)
    path = folder / "last_layer.json"
    path.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    print(f"written: {path}, {draw_plot(found, folder)}")
    return rows


if __name__ == "__main__":
    main()
