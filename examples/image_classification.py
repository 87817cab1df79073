"""Bayes by Backprop on images: accuracy, calibration, and uncertainty on images of
other kinds.

The network learns from all training images of Fashion-MNIST. MNIST and KMNIST are out
of distribution. ``--net textbook`` is one convolution, a pooling and a dense layer,
``--net deep`` has two convolutions. Weights have a
mean-field posterior, learned from minibatches with flipout and local
reparameterization. ``--members`` mixes several of them, from different starts. The
script also compares the time of a step with that of the same network without
uncertainty. The images are read from --data or the folder NUMPYRO_BNN_DATA. Without
them it uses the digits of scikit-learn, the lower five for training and the others as
out of distribution.

    python -m examples.image_classification --help
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples import loaders
from examples.benchmarks.shared import (
    environment,
    interleave,
    median_ratio,
    options_of,
    repeated,
    wall_clock,
    write_report,
)
from examples.shared import at_least, between_marks, markdown, writable_folder

CHUNK = 1000  # images per call of a prediction


class Images(NamedTuple):
    """Training and test images, labels, and test images of other kinds by name."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    foreign: Mapping[str, np.ndarray]

    @property
    def num_classes(self) -> int:
        return int(self.y.max()) + 1

    def standardized(self) -> "Images":
        """Gray values standardized by the training images, those of other kinds too."""
        mean, sd = self.x.mean(), self.x.std()
        foreign = {name: (x - mean) / sd for name, x in self.foreign.items()}
        return self._replace(
            x=(self.x - mean) / sd, x_test=(self.x_test - mean) / sd, foreign=foreign
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.image_classification",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--net", choices=list(NETS), default="textbook", help="network")
    parser.add_argument(
        "--num-epochs", type=int, default=20, help="passes over the training images"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="images per step")
    parser.add_argument(
        "--learning-rate", type=float, default=3e-3, help="first step size of Adam"
    )
    parser.add_argument(
        "--prior-scale",
        type=float,
        default=10.0,
        help="prior sd of weights times root of fan-in",
    )
    parser.add_argument(
        "--members",
        type=int,
        default=1,
        help="fits from different starts, mixed equally",
    )
    parser.add_argument(
        "--num-draws",
        type=int,
        default=60,
        help="draws of the weights for predictions, in all",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds in which steps are timed"
    )
    parser.add_argument(
        "--test-images", type=int, default=10_000, help="images of each kind to predict"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of start, minibatches and draws"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        help="folder that holds image/fashion_mnist.npz",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        help="folder of figures and numbers",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        help="page whose table shows all networks found in --output",
    )
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        ("num_epochs", "batch_size", "members", "num_draws", "rounds", "test_images"),
    )
    return args


def load_data(args: argparse.Namespace) -> Images:

    folder = args.data or os.environ.get("NUMPYRO_BNN_DATA")
    size = args.test_images
    if args.data or (
        folder and (Path(folder) / "image" / "fashion_mnist.npz").is_file()
    ):
        known = loaders.load_images("fashion_mnist", folder)
        foreign = {
            name: loaders.load_images(name, folder).x_test[:size]
            for name in ("mnist", "kmnist")
        }
        return Images(
            known.x_train,
            known.y_train,
            known.x_test[:size],
            known.y_test[:size],
            foreign,
        )
    print(
        "no folder with image/fashion_mnist.npz (--data, NUMPYRO_BNN_DATA): small "
        "digits instead"
    )
    digits = loaders.load_sklearn("digits", seed=args.seed)
    x, x_test = (
        a.reshape(-1, 8, 8, 1).astype(np.float32) / 16
        for a in (digits.x_train, digits.x_test)
    )
    seen, seen_test = digits.y_train < 5, digits.y_test < 5
    foreign = {"digits 5 to 9": x_test[~seen_test][:size]}
    return Images(
        x[seen],
        digits.y_train[seen],
        x_test[seen_test][:size],
        digits.y_test[seen_test][:size],
        foreign,
    )


# --------------------------------------------------------------------------------------
# networks


def textbook(num_classes: int) -> Any:
    from numpyro_bnn import nn

    return nn.Sequential(
        [
            nn.Conv2d(64, 5, padding="VALID"),
            "relu",
            nn.MaxPool(2),
            nn.Flatten(),
            nn.Dense(num_classes),
        ]
    )


def deep(num_classes: int) -> Any:
    from numpyro_bnn import nn

    return nn.Sequential(
        [
            *(nn.Conv2d(32, 5), "relu", nn.MaxPool(2)),
            *(nn.Conv2d(64, 3), "relu", nn.MaxPool(2)),
            *(nn.Flatten(), nn.Dense(num_classes)),
        ]
    )


NETS: dict[str, Callable[[int], Any]] = {"textbook": textbook, "deep": deep}


def make_model(net: Any, num_classes: int, args: argparse.Namespace) -> Callable:
    """Normal weights with sd ``--prior-scale`` / sqrt(fan-in)."""
    import numpyro_bnn as bnn

    return bnn.models.classification(
        net, num_classes, bnn.priors.Normal(args.prior_scale)
    )


# --------------------------------------------------------------------------------------
# learning


class Learned(NamedTuple):
    """A fitted guide, and seconds of each epoch; the first includes compilation."""

    guide: Any
    params: Mapping[str, Any]
    seconds: list[float]


def make_svi(
    model: Callable, guide: Any, num_steps: int, args: argparse.Namespace
) -> Any:
    import optax
    from numpyro.infer import SVI

    from numpyro_bnn import guides

    rate = optax.cosine_decay_schedule(args.learning_rate, num_steps)
    return SVI(model, guide, optax.adam(rate), guides.TraceLocalReparam_ELBO())


def learn(
    model: Callable, data: Images, seed: int, args: argparse.Namespace
) -> Learned:
    """Minimize the negative ELBO from the start that ``seed`` gives; prints the loss
    after each epoch.
    """
    from numpyro_bnn import guides

    data = data._replace(
        x=jnp.asarray(data.x), y=jnp.asarray(data.y)
    )  # on the device once
    steps = max(1, len(data.y) // args.batch_size)
    guide = guides.AutoMeanField(model)
    svi = make_svi(model, guide, steps * args.num_epochs, args)
    fit, seconds = None, []
    for epoch in range(args.num_epochs):
        start = time.perf_counter()
        state = None if fit is None else fit.state
        key = jax.random.key(seed)
        size = {"batch_size": args.batch_size, "progress_bar": False}
        fit = guides.fit(svi, key, steps, data.x, data.y, init_state=state, **size)
        loss = float(np.mean(fit.losses)) / len(data.y)
        seconds.append(time.perf_counter() - start)
        print(
            (
                f"epoch {epoch + 1:3}  negative ELBO per image {loss:7.4f}  "
                f"{seconds[-1]:6.1f} s"
            ),
            flush=True,
        )
    return Learned(guide, fit.params, seconds)


def step_ratio(net: Any, data: Images, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a Bayes by Backprop step and of a plain step, timed alternately,
    and the median ratio.
    """
    import optax

    from numpyro_bnn import guides

    x, y = (
        jnp.asarray(data.x[: args.batch_size]),
        jnp.asarray(data.y[: args.batch_size]),
    )
    model = make_model(net, data.num_classes, args)
    guide = guides.AutoMeanField(model)
    svi = make_svi(model, guide, 1000, args)
    state = svi.init(jax.random.key(args.seed), x, y)
    bayes = jax.jit(lambda state: svi.update(state, x, y)[0])
    optimizer = optax.adam(args.learning_rate)
    params = {
        name: 0.1 * jax.random.normal(jax.random.key(i), shape)
        for i, (name, shape) in enumerate(net.param_shapes(data.x.shape[1:]).items())
    }

    def loss(params: Mapping[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(
            net.apply(params, x), y
        ).mean()

    @jax.jit
    def plain(state: tuple) -> tuple:
        params, inner = state
        updates, inner = optimizer.update(jax.grad(loss)(params), inner)
        return optax.apply_updates(params, updates), inner

    steps = {
        "bayes": (bayes, state),
        "plain": (plain, (params, optimizer.init(params))),
    }
    contenders = {
        name: (repeated(step, at, 5), 5) for name, (step, at) in steps.items()
    }
    interleave(contenders, 1)  # compiles
    times = wall_clock(interleave(contenders, args.rounds))
    milliseconds = {f"{name}_ms": 1e-3 * min(found) for name, found in times.items()}
    return {**milliseconds, "ratio": median_ratio(times, "bayes", "plain")}


# --------------------------------------------------------------------------------------
# predicting


def draws_of_weights(
    learned: Learned, num_draws: int, key: jax.Array
) -> list[dict[str, jax.Array]]:
    draws = learned.guide.sample_posterior(
        key, learned.params, sample_shape=(num_draws,)
    )
    params = {
        name.removeprefix("net/"): value
        for name, value in draws.items()
        if name.startswith("net/")
    }
    return [
        {name: value[s] for name, value in params.items()} for s in range(num_draws)
    ]


def predictor(
    net: Any, members: Sequence[Learned], args: argparse.Namespace
) -> Callable[[np.ndarray], np.ndarray]:
    """Images (N, H, W, 1) -> logits (S, N, K), for S draws of the weights from all
    members.
    """
    keys = jax.random.split(jax.random.key(args.seed + 1), len(members))
    each = max(1, args.num_draws // len(members))
    weights = [
        w
        for pair in zip(members, keys, strict=True)
        for w in draws_of_weights(pair[0], each, pair[1])
    ]
    one = jax.jit(net.apply)

    def predict(x: np.ndarray) -> np.ndarray:
        chunks = [x[i : i + CHUNK] for i in range(0, len(x), CHUNK)]
        return np.stack(
            [np.concatenate([one(w, chunk) for chunk in chunks]) for w in weights]
        )

    return predict


class Drawn(NamedTuple):
    """Logits and class probabilities of images, (S, N, K), and three measures of their
    uncertainty, (N,).
    """

    logits: np.ndarray
    probs: np.ndarray
    doubt: Mapping[str, np.ndarray]


def drawn(logits: np.ndarray) -> Drawn:
    from numpyro_bnn import metrics

    probs = np.asarray(jax.nn.softmax(logits))
    entropies = metrics.uncertainty(probs)
    doubt = {
        "total": entropies.total,
        "mutual information": entropies.mutual_information,
    }
    return Drawn(
        logits, probs, {**doubt, "logits": metrics.relative_logit_variance(logits)}
    )


def score(known: Drawn, foreign: Mapping[str, Drawn], data: Images) -> dict[str, Any]:
    """Accuracy, log score and calibration on test images, and how well uncertainty
    separates other kinds.
    """
    from numpyro_bnn import metrics

    mean = known.probs.mean(0)
    scores = {
        "accuracy": float((mean.argmax(1) == data.y_test).mean()),
        "log_score": float(np.log(mean[np.arange(len(mean)), data.y_test]).mean()),
        "ece": metrics.ece(known.probs, data.y_test).ece,
    }
    for name, other in foreign.items():
        for label, doubt in known.doubt.items():
            scores[f"auroc {name}, {label}"] = metrics.auroc(
                doubt, other.doubt[label]
            ).value
    return scores


# --------------------------------------------------------------------------------------
# figures


def draw_histogram(known: Drawn, foreign: Mapping[str, Drawn], path: Path) -> Path:
    """Both scores that come from the weights, for test images and images of other
    kinds.
    """
    import matplotlib.pyplot as plt

    from numpyro_bnn import metrics

    labels = {
        "mutual information": "mutual information of label and weights [nats]",
        "logits": "relative variance of the logits",
    }
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        scores = {"known": known.doubt[name]} | {
            group: drawn.doubt[name] for group, drawn in foreign.items()
        }
        every = np.concatenate(list(scores.values()))
        edges = (np.geomspace if name == "logits" else np.linspace)(
            every.min(), every.max(), 41
        )
        for group, values in scores.items():
            auroc = (
                f", AUROC {metrics.auroc(scores['known'], values).value:.3f}"
                if group != "known"
                else ""
            )
            share = np.histogram(values, edges)[0] / len(values)
            axis.stairs(
                share,
                edges,
                label=group + auroc,
                fill=group == "known",
                alpha=0.5 if group == "known" else 1,
            )
        axis.set(
            xlabel=label,
            ylabel="share of images",
            xscale="log" if name == "logits" else "linear",
        )
        axis.legend(frameon=False)
    axes[0].set_yscale("log")
    figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def draw_samples(
    groups: Mapping[str, tuple[np.ndarray, np.ndarray]], path: Path, per_group: int = 3
) -> Path:
    """Images, and the mean and central 90 % of their class probabilities."""
    import matplotlib.pyplot as plt

    shown = [
        (name, x[i], p[:, i])
        for name, (x, p) in groups.items()
        for i in range(min(per_group, len(x)))
    ]
    figure, axes = plt.subplots(
        2,
        len(shown),
        figsize=(1.4 * len(shown), 3),
        layout="constrained",
        squeeze=False,
    )
    for (name, image, probs), picture, bars in zip(
        shown, axes[0], axes[1], strict=True
    ):
        picture.imshow(image[..., 0], cmap="gray_r")
        picture.set_title(name, fontsize=8)
        picture.axis("off")
        low, high = np.quantile(probs, [0.05, 0.95], axis=0)
        mean, classes = probs.mean(0), np.arange(probs.shape[1])
        bars.bar(classes, mean, color="0.75")
        bars.vlines(classes, low, high, color="C0")
        bars.set_ylim(0, 1)
        bars.set_xticks(classes[::3])
        bars.set_yticks([0, 1] if bars is axes[1, 0] else [])
    axes[1, 0].set_ylabel("probability")
    figure.supxlabel("class", fontsize=9)
    figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def draw_plots(
    known: Drawn, foreign: Mapping[str, Drawn], data: Images, folder: Path
) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    groups = {"known": (data.x_test, known.probs)}
    groups |= {
        name: (data.foreign[name], other.probs) for name, other in foreign.items()
    }
    return [
        draw_histogram(known, foreign, folder / "image_classification_uncertainty.png"),
        draw_samples(groups, folder / "image_classification_samples.png"),
    ]


def table(folder: Path) -> str:
    """Markdown: a row for each network whose results are in ``folder``."""
    paths = (folder / f"image_classification_{net}.json" for net in NETS)
    reports = [json.loads(path.read_text()) for path in paths if path.is_file()]
    names = [
        name
        for name in reports[0]
        if name.startswith(("accuracy", "log_score", "ece", "auroc"))
    ]
    heads = [
        "network",
        "members",
        "epochs",
        *names,
        "step / plain step",
        "seconds per epoch",
        "seconds",
    ]
    rows = []
    for report in reports:
        cells = [
            report["net"],
            *(str(report["options"][name]) for name in ("members", "num_epochs")),
        ]
        cells += [f"{report[name]:.3f}" for name in names] + [
            f"{report['step']['ratio']:.2f}"
        ]
        cells += [
            f"{statistics.median(report['seconds']):.0f}",
            f"{sum(report['seconds']):.0f}",
        ]
        rows.append(cells)
    return markdown(heads, rows)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    folder = writable_folder(args.output)
    data = load_data(args).standardized()
    net = NETS[args.net](data.num_classes)
    size = sum(
        int(np.prod(shape)) for shape in net.param_shapes(data.x.shape[1:]).values()
    )
    print(
        f"{len(data.y)} training images, network {args.net!r} of {size} weights, "
        f"batches of {args.batch_size}"
    )
    ratio = step_ratio(net, data, args)
    print(
        (
            "time of a step: {bayes_ms:.1f} ms, plain network: {plain_ms:.1f} ms, "
            "ratio {ratio:.2f}"
        ).format(**ratio)
    )
    model = make_model(net, data.num_classes, args)
    members = [
        learn(model, data, args.seed + member, args) for member in range(args.members)
    ]
    predict = predictor(net, members, args)
    known, foreign = (
        drawn(predict(data.x_test)),
        {n: drawn(predict(x)) for n, x in data.foreign.items()},
    )
    scores = score(known, foreign, data)
    for name, value in scores.items():
        print(f"{name:36}{value:8.4f}")
    seconds = [second for learned in members for second in learned.seconds]
    print(
        f"{sum(seconds):.0f} s of training in total, {statistics.median(seconds):.1f} "
        f"s per epoch"
    )
    report = {
        "net": args.net,
        "weights": size,
        **scores,
        "step": ratio,
        "seconds": seconds,
    }
    path = folder / f"image_classification_{args.net}.json"
    write_report(path, {**report, "options": options_of(args), **environment([])})
    if args.docs is not None:
        between_marks(args.docs, table(folder), "image_classification")
    print(
        "written: "
        + ", ".join(map(str, [path, *draw_plots(known, foreign, data, folder)]))
    )
    return report


if __name__ == "__main__":
    main()
