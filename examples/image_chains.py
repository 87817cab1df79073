"""Chains from minibatches on images, compared with an ensemble, mean field, dropout and
Laplace.

Fashion-MNIST with LeNet-5 or a small residual network with layer normalization. MNIST
and KMNIST are out of distribution. ``--members`` networks are trained, which are the
deep ensemble. The chains start at the first ``--chains`` of them and take as many
epochs again, so twice as many networks as chains cost as many gradients. The images are
read from --data or the folder NUMPYRO_BNN_DATA. Without them it uses the digits of
scikit-learn. Each method that is finished is kept in --output, and a later call does
the others.

    python -m examples.image_chains --help
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from examples.benchmarks.shared import environment, options_of, provenance, write_report
from examples.image_classification import Images, draws_of_weights, learn, load_data
from examples.shared import at_least, between_marks, markdown, writable_folder
from numpyro_bnn import nn

CHUNK = 1000  # images per call of a prediction
Weights = dict[str, np.ndarray]  # draws of the parameters of a network, (S, ...)


# Name, default and help of the numbers; those that are integers must be positive,
# except for the seed.
NUMBERS: dict[str, tuple[int | float, str]] = {
    "num_epochs": (4, "epochs that train a network"),
    "chain_epochs": (4, "epochs of gradients of a chain after that"),
    "members": (10, "networks of the ensemble"),
    "chains": (5, "chains, which start at the first networks"),
    "num_draws": (8, "draws kept per chain"),
    "batch_size": (64, "images per gradient"),
    "test_images": (10_000, "test images"),
    "foreign_images": (2000, "images of each other kind"),
    "learning_rate": (2e-3, "first step size of Adam"),
    "step_size": (
        0.02,
        "largest step size of SGHMC, times the number of training images",
    ),
    "cold": (0.1, "temperature of the cold chains"),
    "prior_scale": (2**0.5, "prior sd of weights times root of fan-in"),
    "seed": (0, "seed of starts, minibatches and draws"),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.image_chains",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--net", choices=list(NETS), default="lenet", help="network")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        help="what to compare",
    )
    for name, (value, text) in NUMBERS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value, help=text
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
        help="folder of the numbers and the figure",
    )
    parser.add_argument(
        "--docs", type=Path, help="page whose table shows all results found in --output"
    )
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        [
            name
            for name, (value, _) in NUMBERS.items()
            if type(value) is int and name != "seed"
        ],
    )
    at_least(parser, args, ["members"], args.chains)
    return args


# --------------------------------------------------------------------------------------
# networks


@dataclass(frozen=True)
class Dropout(nn.Layer):
    """Sets units to 0 at random, also for predictions."""

    rate: float = 0.25

    def shapes(self, input_shape: tuple, path: str = "") -> tuple[dict, tuple]:
        return {}, input_shape

    def forward(self, context: Any, x: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(numpyro.prng_key(), 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0.0)


def lenet(num_classes: int, height: int, dropout: bool = False) -> nn.Layer:
    """LeNet-5 with rectifiers and maxima: 61,706 weights for 28 x 28 pixels and ten
    classes.
    """
    window, drop = (5 if height > 20 else 3), [Dropout()] if dropout else []
    return nn.Sequential(
        [
            *(nn.Conv2d(6, 5), nn.MaxPool(2), "relu"),
            *(
                nn.Conv2d(16, window, padding="VALID"),
                nn.MaxPool(2),
                "relu",
                nn.Flatten(),
            ),
            *(
                *drop,
                nn.Dense(120),
                "relu",
                *drop,
                nn.Dense(84),
                "relu",
                *drop,
                nn.Dense(num_classes),
            ),
        ]
    )


def residual(
    num_classes: int, height: int, dropout: bool = False, channels: int = 16
) -> nn.Layer:
    """Three residual blocks, normalized before each convolution."""
    few, many = channels, 2 * channels

    def block(number: int) -> nn.Layer:
        return nn.Residual(
            nn.Sequential([nn.LayerNorm(), "relu", nn.Conv2d(number, 3)])
        )

    first = [nn.Conv2d(few, 5, 2), block(few), nn.LayerNorm(), "relu"]
    last = [
        nn.Conv2d(many, 3, 2),
        block(many),
        block(many),
        nn.LayerNorm(),
        "relu",
        nn.Flatten(),
    ]
    return nn.Sequential(
        [*first, *last, *([Dropout()] if dropout else []), nn.Dense(num_classes)]
    )


NETS: dict[str, Callable[..., nn.Layer]] = {
    "lenet": lenet,
    "residual": residual,
    "wide": partial(
        residual, channels=32
    ),  # 134,314 weights; batches of 32 take half the time of 64 on a core
}


# --------------------------------------------------------------------------------------
# methods


class Problem(NamedTuple):
    """A network, the images, and the options; ``trained`` holds the weights of the
    ensemble once they are known.
    """

    net: nn.Layer
    data: Images
    args: argparse.Namespace
    trained: Weights

    @property
    def steps(self) -> int:
        """Gradients in an epoch."""
        return max(1, len(self.data.y) // self.args.batch_size)

    def longer(self) -> "Problem":
        return self._replace(
            args=argparse.Namespace(
                **vars(self.args) | {"num_epochs": 2 * self.args.num_epochs}
            )
        )

    def model(self, net: nn.Layer | None = None, prior: Any = None) -> Callable:
        import numpyro_bnn as bnn

        prior = bnn.priors.Normal(self.args.prior_scale) if prior is None else prior
        return bnn.models.classification(net or self.net, self.data.num_classes, prior)

    def run(
        self, kernel: Any, num_chains: int, init_params: Any = None, **lengths: int
    ) -> Any:
        """A run on the training images, one chain after the other."""
        from numpyro.infer import MCMC

        mcmc = MCMC(
            kernel,
            num_chains=num_chains,
            chain_method="sequential",
            progress_bar=False,
            **lengths,
        )
        size, key = {"batch_size": self.args.batch_size}, jax.random.key(self.args.seed)
        mcmc.run(
            key,
            jnp.asarray(self.data.x),
            jnp.asarray(self.data.y),
            init_params=init_params,
            **size,
        )
        return mcmc


class Found(NamedTuple):
    """Draws of the weights of all chains, epochs of gradients, and how many of the
    trained networks were used.
    """

    weights: Weights
    epochs: float
    networks: int = 0
    temperature: float | str = ""
    dropout: bool = False


def weights_of(draws: Mapping[str, Any]) -> Weights:
    """Draws by parameter (S, ...), the chains one after the other, from those by site
    (C, S, ...).
    """
    found = {
        name[4:]: np.asarray(value)
        for name, value in draws.items()
        if name.startswith(("net/", "net."))
    }
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in found.items()}


def trained(problem: Problem, number: int, net: nn.Layer | None = None) -> Weights:
    """Networks at the modes that Adam finds from random starts: the members of a warm
    start.
    """
    import optax
    from numpyro.infer import init_to_sample

    import numpyro_bnn as bnn

    args, steps = problem.args, problem.args.num_epochs * problem.steps
    adam = optax.adam(optax.cosine_decay_schedule(args.learning_rate, steps))
    optimizer = optax.chain(optax.scale(1 / len(problem.data.y)), adam)
    warm = bnn.infer.WarmStart(
        args.num_epochs / (args.num_epochs + 1), num_steps=steps, optimizer=optimizer
    )
    options = {"steps_per_draw": 1, "warm_start": warm, "init_strategy": init_to_sample}
    kernel = bnn.infer.SGHMC(problem.model(net), 1e-9, **options)
    mcmc = problem.run(kernel, number, num_warmup=args.num_epochs + 1, num_samples=1)
    exported = bnn.to_inference_data(
        mcmc, members=True, posterior_predictive=False, log_likelihood=False
    )
    return weights_of(
        {name: value.to_numpy() for name, value in exported["posterior"].items()}
    )


def first(problem: Problem, number: int) -> Weights:
    return {name: value[:number] for name, value in problem.trained.items()}


def one_network(problem: Problem) -> Found:
    return Found(first(problem, 1), problem.args.num_epochs, 1)


def ensemble(problem: Problem) -> Found:
    return Found(
        problem.trained,
        problem.args.members * problem.args.num_epochs,
        problem.args.members,
    )


def dropout(problem: Problem) -> Found:
    """One network with twice the epochs, and masks of its units drawn for each
    prediction.
    """
    problem = problem.longer()
    net = NETS[problem.args.net](
        problem.data.num_classes, problem.data.x.shape[1], dropout=True
    )
    return Found(trained(problem, 1, net), problem.args.num_epochs, dropout=True)


def mean_field(problem: Problem) -> Found:
    problem = problem.longer()
    args = problem.args
    fitted = learn(problem.model(), problem.data, args.seed, args)
    draws = draws_of_weights(
        fitted, args.chains * args.num_draws, jax.random.key(args.seed + 1)
    )
    return Found(
        {name: np.stack([draw[name] for draw in draws]) for name in draws[0]},
        args.num_epochs,
        0,
        1,
    )


def laplace(problem: Problem) -> Found:
    """The last layer of the first network is random, the others are fixed."""
    from numpyro_bnn import guides, priors

    args, data = problem.args, problem.data
    params = {name: value[0] for name, value in problem.trained.items()}
    last = list(problem.net.param_shapes(data.x.shape[1:]))[-1].split(".")[0]
    model = problem.model(
        prior={f"{last}.*": priors.Normal(args.prior_scale), "*": priors.Fixed(params)}
    )
    guide, start = (
        guides.AutoLaplace(model, "kron"),
        {f"net/{n}": v for n, v in params.items() if n.startswith(last)},
    )
    size, key = (
        {"batch_size": CHUNK // 2, "progress_bar": False},
        jax.random.key(args.seed),
    )
    fit = guide.run(
        key,
        jnp.asarray(data.x),
        jnp.asarray(data.y),
        num_epochs=0,
        init_params=start,
        **size,
    )
    number = args.chains * args.num_draws
    draws = guide.sample_posterior(key, fit.params, sample_shape=(number,))
    random = weights_of(
        {name: value[None] for name, value in draws.items() if name in start}
    )
    fixed = {
        name: np.broadcast_to(value, (number, *value.shape))
        for name, value in params.items()
    }
    return Found(fixed | random, args.num_epochs + 1, 1, 1)


def chains(
    problem: Problem, kernel: str = "SGHMC", temperature: float = 1.0, cycles: int = 1
) -> Found:
    """Chains from the first networks; the first two thirds, of each cycle if there are
    some, are left out.

    The step size of SGHMC falls to 0 along a cosine in each cycle. The other kernels
    choose it in warm-up, with a preconditioner learned from gradient noise; a step of
    MCLMC takes two gradients.
    """
    from numpyro_bnn import infer

    args, steps = problem.args, problem.args.chain_epochs * problem.steps
    draws, cycle = 3 * args.num_draws, 3 * args.num_draws // cycles
    per_draw = max(1, steps // draws // (2 if kernel == "MCLMC" else 1))
    options: dict[str, Any] = {
        "steps_per_draw": per_draw,
        "temperature": temperature,
        "warm_start": 0.0,
    }
    lengths = {"num_warmup": draws - args.num_draws, "num_samples": args.num_draws}
    if kernel == "SGHMC":
        largest = args.step_size / len(problem.data.y)
        schedule = infer.schedules.cyclical(
            largest, num_steps=draws * per_draw, num_cycles=cycles
        )
        options, lengths = (
            options | {"step_size": schedule},
            {"num_warmup": 0, "num_samples": draws},
        )
    start = {
        f"net/{name}": jnp.asarray(value)
        for name, value in first(problem, args.chains).items()
    }
    if args.chains == 1:
        start = {name: value[0] for name, value in start.items()}
    mcmc = problem.run(
        getattr(infer, kernel)(problem.model(), **options),
        args.chains,
        start,
        **lengths,
    )
    kept = mcmc.get_samples(group_by_chain=True)
    if kernel == "SGHMC":
        kept = {
            name: value[:, np.arange(draws) % cycle >= 2 * cycle // 3]
            for name, value in kept.items()
        }
    epochs = args.chains * (args.num_epochs + args.chain_epochs)
    return Found(weights_of(kept), epochs, args.chains, temperature)


METHODS: dict[str, Callable[[Problem], Found]] = {
    "network": one_network,
    "ensemble": ensemble,
    "dropout": dropout,
    "mean-field": mean_field,
    "last-layer-Laplace": laplace,
    "SGHMC": chains,
    "SGHMC-cold": lambda problem: chains(problem, temperature=problem.args.cold),
    "SGHMC-cycles": partial(chains, cycles=2),
    "SGNHT": partial(chains, kernel="SGNHT"),
    "MCLMC": partial(chains, kernel="MCLMC"),
}


# --------------------------------------------------------------------------------------
# predicting


@partial(jax.jit, static_argnums=0)
def output(net: nn.Layer, weights: Weights, key: jax.Array, x: jax.Array) -> jax.Array:
    with numpyro.handlers.seed(rng_seed=key):  # of the masks of dropout
        return net.apply(weights, x)


def logits_of(found: Found, problem: Problem, x: np.ndarray) -> np.ndarray:
    """Logits (S, N, K) of images (N, H, W, 1); a network with dropout has as many draws
    as the chains.
    """
    args, number = problem.args, next(iter(found.weights.values())).shape[0]
    net = NETS[args.net](problem.data.num_classes, x.shape[1], found.dropout)
    keys = jax.random.split(
        jax.random.key(args.seed),
        args.chains * args.num_draws if found.dropout else number,
    )

    chunks = [x[i : i + CHUNK] for i in range(0, len(x), CHUNK)]
    draws = (
        {name: value[s % number] for name, value in found.weights.items()}
        for s in range(len(keys))
    )
    pairs = zip(draws, keys, strict=True)
    return np.stack(
        [
            np.concatenate([output(net, *pair, chunk) for chunk in chunks])
            for pair in pairs
        ]
    )


def score(found: Found, problem: Problem) -> dict[str, Any]:
    """Scores of the mean prediction, areas under the curve for images of other kinds,
    and the path of the NLL.
    """
    from numpyro_bnn import metrics

    data, labels = problem.data, problem.data.y_test
    logits = {
        name: logits_of(found, problem, x)
        for name, x in {"": data.x_test, **data.foreign}.items()
    }
    probs = {
        name: np.asarray(jax.nn.softmax(jnp.asarray(value)))
        for name, value in logits.items()
    }
    each = probs[""][:, np.arange(len(labels)), labels].astype(np.float64)
    means = np.cumsum(each, axis=0) / np.arange(1, len(each) + 1)[:, None]
    path = [-float(np.log(mean).mean()) for mean in means]
    scores = {
        "draws": len(each),
        "accuracy": metrics.accuracy(probs[""], labels).value,
        "NLL": path[-1],
    }
    scores |= {
        "NLL of a draw": -float(np.log(each).mean()),
        "ECE": metrics.ece(probs[""], labels).ece,
        "path": path,
    }
    doubts = {
        "entropy": {
            name: metrics.uncertainty(value).total for name, value in probs.items()
        }
    }
    if len(each) > 1:
        doubts["logits"] = {
            name: metrics.relative_logit_variance(value)
            for name, value in logits.items()
        }
    for name in data.foreign:
        for label, doubt in doubts.items():
            scores[f"AUROC {name}, {label}"] = metrics.auroc(
                doubt[""], doubt[name]
            ).value
    return scores


# --------------------------------------------------------------------------------------
# report


def table(report: dict[str, Any]) -> str:
    """A row for each network and method."""
    areas = sorted(
        {name for row in report["rows"] for name in row if name.startswith("AUROC")}
    )
    names = ["accuracy", "NLL", "NLL of a draw", "ECE", *areas]
    heads = [
        "network",
        "method",
        "temperature",
        "epochs",
        "draws",
        *names,
        "processor seconds",
    ]
    rows = []
    for row in report["rows"]:
        cells = [
            row["net"],
            row["method"],
            row["temperature"],
            f"{row['epochs']:g}",
            row["draws"],
        ]
        cells += [f"{row[name]:.3f}" if name in row else "" for name in names]
        rows.append([*cells, f"{row['seconds']:.0f}"])
    return markdown(heads, rows)


def draw_plot(report: dict[str, Any], folder: Path) -> Path:
    """Negative log likelihood of the test images against the number of draws that are
    averaged.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    nets = list(dict.fromkeys(row["net"] for row in report["rows"]))
    figure, axes = plt.subplots(
        1, len(nets), figsize=(4 * len(nets), 3.5), squeeze=False, layout="constrained"
    )
    for axis, net in zip(axes[0], nets, strict=True):
        for row in report["rows"]:
            if row["net"] == net:
                axis.plot(
                    range(1, len(row["path"]) + 1),
                    row["path"],
                    ".-",
                    ms=3,
                    lw=1,
                    label=row["method"],
                )
        axis.set(title=net, xlabel="draws", ylabel="NLL of test images")
        axis.legend(fontsize=6)
    path = folder / "image_chains.png"
    figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


def trained_once(problem: Problem, folder: Path) -> tuple[Problem, float]:
    """The problem with the networks of the ensemble, read if they are on disk, and
    processor seconds of each.
    """
    args = problem.args
    path = (
        folder
        / f"image_chains_{args.net}_{args.members}x{args.num_epochs}_{args.seed}.npz"
    )
    if not path.is_file():
        start = time.process_time()
        found = trained(problem, args.members)
        np.savez(path, seconds=time.process_time() - start, **found)
    weights = dict(np.load(path))
    seconds = float(weights.pop("seconds")) / args.members
    return problem._replace(trained=weights), seconds


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    folder = writable_folder(args.output)
    data = load_data(args).standardized()
    few = {
        name: x[:: max(1, len(x) // args.foreign_images)]
        for name, x in data.foreign.items()
    }
    data = data._replace(foreign=few)
    net = NETS[args.net](data.num_classes, data.x.shape[1])
    size = sum(
        int(np.prod(shape)) for shape in net.param_shapes(data.x.shape[1:]).values()
    )
    print(
        f"{len(data.y)} training images, network {args.net!r} of {size} weights, "
        f"batches of {args.batch_size}"
    )
    problem, seconds = trained_once(Problem(net, data, args, {}), folder)
    path = folder / "image_chains.json"
    report = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    for method in args.methods:
        if any(
            (row["net"], row["method"]) == (args.net, method) for row in report["rows"]
        ):
            continue
        start = time.process_time()
        found = METHODS[method](problem)
        spent = time.process_time() - start + seconds * found.networks
        row = {
            "net": args.net,
            "weights": size,
            "method": method,
            "temperature": found.temperature,
        }
        row |= {"epochs": found.epochs, "seconds": spent, **score(found, problem)}
        options = {
            name: value for name, value in options_of(args).items() if name != "methods"
        }
        runs = [
            *report.get("options", []),
            *([] if options in report.get("options", []) else [options]),
        ]
        report = {
            **report,
            "rows": [*report["rows"], row],
            "options": runs,
            **environment([]),
        }
        write_report(path, report)
        print(
            (
                f"{method:20} accuracy {row['accuracy']:.4f}  NLL {row['NLL']:.4f}  "
                f"{spent:7.0f} s"
            ),
            flush=True,
        )
    if args.docs is not None:
        between_marks(
            args.docs, f"{table(report)}\n\n{provenance([report])}", "image_chains"
        )
    print(f"written: {path}, {draw_plot(report, folder)}")
    return report


if __name__ == "__main__":
    main()
