"""Digits that the network has never seen: does it know that it does not know them?

Two of the ten classes of scikit-learn's digits are left out of training. Among the test
images they are unknown. Three ways to learn the other eight: one network trained by
optax, an ensemble of such networks, and MCLMC chains that sample the weights. Scored
are accuracy and negative log likelihood (NLL) on known digits, and how well the entropy
of the class probabilities separates unknown digits from known ones (AUROC: 0.5 is
chance, 1 perfect).

    python -m examples.unknown_digits --help
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import MCMC

import numpyro_bnn as bnn
from examples import loaders
from examples.shared import at_least, early_stopped, markdown, writable_folder
from numpyro_bnn import metrics

ONE, ENSEMBLE, SAMPLED = "one network", "ensemble", "MCLMC"
SCORES = ("accuracy", "nll", "auroc")
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))


class Digits(NamedTuple):
    """Known digits for training and test, labels 0..7, and test images of the unknown
    ones; pixels from 0 to 1.
    """

    x: np.ndarray
    y: np.ndarray
    x_known: np.ndarray
    y_known: np.ndarray
    x_unknown: np.ndarray
    pixels: (
        np.ndarray
    )  # those of 64 that vary among the training images; others are left out


def load_digits(unknown: tuple[int, int], rows: int, seed: int) -> Digits:
    data = loaders.load_sklearn("digits", 0.4, seed)
    label = np.cumsum(~np.isin(np.arange(10), unknown)) - 1
    seen, known = ~np.isin(data.y_train, unknown), ~np.isin(data.y_test, unknown)
    pixels = np.flatnonzero(np.ptp(data.x_train[seen][:rows], axis=0))
    x, x_test = (
        (part[:, pixels] / 16).astype(np.float32)
        for part in (data.x_train, data.x_test)
    )
    known_rows = x_test[known], label[data.y_test[known]]
    return Digits(
        x[seen][:rows],
        label[data.y_train[seen]][:rows],
        *known_rows,
        x_test[~known],
        pixels,
    )


# --------------------------------------------------------------------------------------
# learners


def trained(
    net: Any, digits: Digits, args: argparse.Namespace, seed: int
) -> np.ndarray:
    """Class probabilities (members, N, K) of networks trained by Adam, each stopped
    where held-out rows are best.
    """
    x, y = jnp.asarray(digits.x), jnp.asarray(digits.y)
    held = len(x) // 10
    new = jnp.concatenate([digits.x_known, digits.x_unknown])

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            net.apply(params, x), y
        ).mean()

    def member(key: jax.Array) -> jax.Array:
        parts = (
            (lambda params: loss(params, x[held:], y[held:])),
            (lambda params: loss(params, x[:held], y[:held])),
        )
        start = net.init(key, x.shape[1:])
        best, _ = early_stopped(*parts, start, optax.adam(0.003), args.optimizer_steps)
        return jax.nn.softmax(net.apply(best, new))

    return np.asarray(
        jax.jit(jax.vmap(member))(jax.random.split(jax.random.key(seed), args.members))
    )


def sampled(
    net: Any, digits: Digits, args: argparse.Namespace, seed: int
) -> np.ndarray:
    """The same by draw: all chains together."""
    model = bnn.models.classification(net, 8, bnn.priors.Hierarchical())
    warm = bnn.infer.WarmStart(0.5, num_steps=args.optimizer_steps)
    kernel = bnn.infer.MCLMC(model, steps_per_draw=args.steps_per_draw, warm_start=warm)
    numbers = {
        "num_warmup": args.num_warmup,
        "num_samples": args.num_samples,
        "num_chains": args.num_chains,
    }
    mcmc = MCMC(kernel, chain_method="vectorized", progress_bar=False, **numbers)
    mcmc.run(jax.random.key(seed), digits.x, digits.y)
    new = {"x": np.concatenate([digits.x_known, digits.x_unknown])}
    options = {"log_likelihood": False, "posterior_predictive": False}
    probs = bnn.to_inference_data(mcmc, predictions=new, **options)["predictions"][
        "y_probs"
    ].to_numpy()
    return probs.reshape(-1, *probs.shape[-2:])


# --------------------------------------------------------------------------------------
# scores


def scores(probs: np.ndarray, digits: Digits) -> tuple[dict[str, float], np.ndarray]:
    """Of the mean over members or draws, and the entropy of every test image, known
    ones first.
    """
    probs = probs.astype(np.float64)
    probs, number = probs / probs.sum(-1, keepdims=True), len(digits.y_known)
    known = probs[:, :number].mean(0)
    entropy = metrics.uncertainty(probs).total
    values = (
        metrics.accuracy(known, digits.y_known).value,
        -metrics.log_score(known, digits.y_known).value,
        metrics.auroc(entropy[:number], entropy[number:]).value,
    )
    return dict(zip(SCORES, values, strict=True)), entropy


def draw_figure(path: Path, digits: Digits, entropies: dict[str, np.ndarray]) -> None:
    """Histograms of the entropy by way, and below the images of which MCLMC is least
    certain.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(8, 4.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3, 1))
    number, bins = len(digits.y_known), np.linspace(0, np.log(8), 25)
    for ax, (way, entropy) in zip(
        above.subplots(1, 3, sharey=True), entropies.items(), strict=True
    ):
        ax.hist(entropy[:number], bins, alpha=0.6, density=True, label="known")
        ax.hist(entropy[number:], bins, alpha=0.6, density=True, label="unknown")
        ax.set(title=way, xlabel="entropy", yscale="log")
        ax.legend()
    images, found = (
        np.concatenate([digits.x_known, digits.x_unknown]),
        entropies[SAMPLED],
    )
    for ax, row in zip(below.subplots(1, 12), np.argsort(-found)[:12], strict=True):
        image = np.zeros(64)
        image[digits.pixels] = images[row]
        ax.imshow(image.reshape(8, 8), cmap="gray_r")
        ax.set_title("known" if row < number else "unknown", fontsize="small")
        ax.set_axis_off()
    below.suptitle("most uncertain by MCLMC", fontsize="medium")
    figure.savefig(path, dpi=200)
    plt.close(figure)


# --------------------------------------------------------------------------------------
# script


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.unknown_digits",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=5,
        help="pairs of unknown digits, the first of 0 and 1, 2 and 3",
    )
    parser.add_argument(
        "--train-rows", type=int, default=800, help="training images, at most"
    )
    parser.add_argument("--width", type=int, default=32, help="hidden units")
    parser.add_argument(
        "--members", type=int, default=5, help="networks of the ensemble"
    )
    parser.add_argument(
        "--optimizer-steps", type=int, default=1000, help="steps of Adam"
    )
    parser.add_argument("--num-chains", type=int, default=4, help="chains of MCLMC")
    parser.add_argument(
        "--num-warmup", type=int, default=60, help="warm-up transitions per chain"
    )
    parser.add_argument("--num-samples", type=int, default=60, help="draws per chain")
    parser.add_argument(
        "--steps-per-draw", type=int, default=50, help="gradients per draw"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of JSON and figure"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("pairs", "members"), 2)
    at_least(
        parser,
        args,
        (
            "width",
            "optimizer_steps",
            "num_chains",
            "num_warmup",
            "num_samples",
            "steps_per_draw",
        ),
    )
    at_least(parser, args, ("train_rows",), 20)
    if args.pairs > len(PAIRS):
        parser.error(f"--pairs must be at most {len(PAIRS)}")
    return args


def main(argv: list[str] | None = None) -> dict[str, dict[str, list[float]]]:
    args = parse(argv)
    folder = writable_folder(args.output)
    net = bnn.nn.MLP([args.width, 8], "relu")
    found: dict[str, dict[str, list[float]]] = {
        way: {score: [] for score in SCORES} for way in (ONE, ENSEMBLE, SAMPLED)
    }
    for i, pair in enumerate(PAIRS[: args.pairs]):
        digits = load_digits(pair, args.train_rows, args.seed + i)
        members = trained(net, digits, args, args.seed + i)
        probs = {
            ONE: members[:1],
            ENSEMBLE: members,
            SAMPLED: sampled(net, digits, args, args.seed + i),
        }
        results = {way: scores(values, digits) for way, values in probs.items()}
        for way, (by_score, _) in results.items():
            for score, value in by_score.items():
                found[way][score].append(value)
        if i == 0:
            draw_figure(
                folder / "unknown_digits.png",
                digits,
                {way: entropy for way, (_, entropy) in results.items()},
            )

    def cell(values: Any, sign: str = "") -> str:
        return (
            f"{np.mean(values):{sign}.3f} ± "
            f"{np.std(values, ddof=1) / len(values) ** 0.5:.3f}"
        )

    print(
        f"digits, {args.train_rows} training images, {args.pairs} pairs of unknown "
        f"digits"
    )
    rows = [
        (way, *(cell(values) for values in by_score.values()))
        for way, by_score in found.items()
    ]
    for way in (ONE, ENSEMBLE):
        gains = (
            cell(np.subtract(found[SAMPLED][score], found[way][score]), "+")
            for score in SCORES
        )
        rows.append((f"{SAMPLED} minus {way}", *gains))
    print(markdown(("way", "accuracy", "NLL", "AUROC, unknown digits"), rows))
    (folder / "unknown_digits.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
