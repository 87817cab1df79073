"""Networks sampled three ways: centered, non-centered, and with moves along their
symmetries.

Three networks, a batch-norm MLP, a small residual network with batch norm and a ReLU
MLP, each with one learned scale per layer. The likelihood does not change along the
orbits of their symmetries, and gradient samplers move slowly there. For every way the
tables show effective sample sizes of the log norms of the units, of the learned scales,
of the coordinates on the orbits and of the predicted function. They also show
divergences, and whether the posterior of the scale is correct.

Runs on the diabetes data that ship with scikit-learn, or on a UCI set of a data folder:

    python -m examples.symmetries --set boston --data FOLDER --output output/boston
    python -m examples.symmetries --summarize output/boston/symmetries.json --table
    docs/tables/symmetries.md
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples import loaders
from examples.benchmarks.shared import environment, options_of
from examples.shared import at_least, writable_folder

WAYS = ("centered", "non-centered", "moves")
NETS = {
    "bn": "batch-norm MLP",
    "residual": "residual network with batch norm",
    "relu": "ReLU MLP",
}
TEST_POINTS = 50
FIRST = "net/Dense_0.kernel"
# A learned scale before a normalization keeps its prior HalfNormal(1): mean and 90 %
# interval of log |N(0, 1)|.
EXACT_MEAN, EXACT_INTERVAL = (
    -0.5 * (np.log(2.0) + np.euler_gamma),
    (np.log(0.0627068), np.log(1.959964)),
)

NOTES = """\
Two numbers in a cell are the median and the minimum over units, scales or test points. ESS is that of all chains
together, per draw and per processor second of the draws. *Moves* uses the non-centered model and all symmetries but
permutations.

| column | what mixes |
| --- | --- |
| log norm | of the weights into a unit |
| log s | learned scales. The first has its error, and before a normalization its exact mean is {exact:.3f} |
| log ratio, log product | of the norms on both sides of a ReLU unit: its place on its orbit, and the orbit itself |
| place | the exact distribution function of that place. Independent draws if moves are exact |
| function | at test points. Where its R-hat is far from 1 no way has found all modes |"""  # noqa: E501


class Fit(NamedTuple):
    """A finished run: draws of all sites (C, S, ...), statistics of the transitions,
    and its cost.
    """

    sites: Mapping[str, np.ndarray]
    divergences: int
    mean_tree: float
    warmup_seconds: float
    seconds: float
    processor_seconds: float


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.symmetries",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--set", default="diabetes", help="diabetes, or a UCI set: boston, energy, ..."
    )
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the UCI sets"
    )
    parser.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="networks"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        help="ways to sample them",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="seeds of the samplers"
    )
    parser.add_argument(
        "--width", type=int, default=20, help="hidden units of the MLPs"
    )
    parser.add_argument(
        "--residual-width",
        type=int,
        default=8,
        help="hidden units of the residual network",
    )
    parser.add_argument("--num-chains", type=int, default=2, help="chains, vectorized")
    parser.add_argument(
        "--num-warmup", type=int, default=500, help="warm-up transitions per chain"
    )
    parser.add_argument("--num-samples", type=int, default=500, help="draws per chain")
    parser.add_argument("--max-tree-depth", type=int, default=8, help="of NUTS")
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of JSON and figures"
    )
    parser.add_argument(
        "--summarize",
        type=Path,
        nargs="+",
        help="sample nothing: read these JSON files",
    )
    parser.add_argument(
        "--table", type=Path, help="write the tables as Markdown to this file"
    )
    args = parser.parse_args(argv)
    at_least(parser, args, ("width", "residual_width", "num_warmup", "max_tree_depth"))
    at_least(parser, args, ("num_chains",), 2)
    at_least(parser, args, ("num_samples",), 4)  # R-hat and ESS need as many
    return args


def load_data(args: argparse.Namespace) -> Any:
    if args.set == "diabetes":
        data = loaders.load_sklearn("diabetes", seed=0)
    else:
        data = loaders.load_uci(args.set, folder=args.data)
    return loaders.standardize(data)


# --------------------------------------------------------------------------------------
# sampling


def make_net(name: str, args: argparse.Namespace) -> Any:
    from numpyro_bnn import nn

    if name == "relu":
        return nn.MLP([args.width, 1], "relu")
    if name == "bn":
        return nn.MLP([args.width, 1], "tanh", norm=nn.BatchNorm())
    width = args.residual_width
    body = nn.Sequential([nn.Dense(width), nn.BatchNorm(), "tanh", nn.Dense(width)])
    return nn.Sequential(
        [nn.Dense(width), nn.BatchNorm(), "tanh", nn.Residual(body), nn.Dense(1)]
    )


def make_model(net: Any, centered: bool) -> Callable:
    import numpyro_bnn as bnn

    return bnn.models.regression(net, bnn.priors.Hierarchical(centered=centered))


def symmetries_of(net: Any, data: Any) -> list:
    from numpyro_bnn import symmetry

    found = symmetry.find(make_model(net, centered=False), data.x_train, data.y_train)
    return [s for s in found if not isinstance(s, symmetry.Permutation)]


def make_kernel(
    way: str, net: Any, symmetries: list, data: Any, args: argparse.Namespace
) -> Any:
    from numpyro.infer import NUTS

    from numpyro_bnn import infer

    model = make_model(net, centered=way == "centered")
    nuts = NUTS(model, max_tree_depth=args.max_tree_depth)
    return infer.OrbitMoves(nuts, symmetries) if way == "moves" else nuts


class Sampler:
    """A kernel compiled once for all seeds. ``MCMC`` runs the same transitions; these
    times exclude compilation.
    """

    def __init__(self, kernel: Any, data: Any, args: argparse.Namespace) -> None:
        self.kernel, self.args, self.call = kernel, args, (data.x_train, data.y_train)
        self.length = math.gcd(args.num_warmup, args.num_samples)
        self.compiled: Any = None

    def transition(self, state: Any, _: None) -> tuple[Any, tuple]:
        import jax

        state = self.kernel.sample(state, self.call, {})
        sites = jax.vmap(self.kernel.postprocess_fn(self.call, {}))(
            getattr(state, self.kernel.sample_field)
        )
        return state, (sites, state.diverging, state.num_steps)

    def run(self, seed: int) -> Fit:
        import jax

        args = self.args
        keys = jax.random.split(jax.random.key(seed), args.num_chains)
        state = self.kernel.init(
            keys, args.num_warmup, None, model_args=self.call, model_kwargs={}
        )
        if self.compiled is None:
            many = jax.jit(
                lambda state: jax.lax.scan(self.transition, state, None, self.length)
            )
            self.compiled = many.lower(state).compile()
        start = time.perf_counter()
        for _ in range(args.num_warmup // self.length):
            state, _ = self.compiled(state)
        jax.block_until_ready(state)
        warm, processor = time.perf_counter(), time.process_time()
        parts = []
        for _ in range(args.num_samples // self.length):
            state, part = self.compiled(state)
            parts.append(jax.device_get(part))
        seconds, processor_seconds = (
            time.perf_counter() - warm,
            time.process_time() - processor,
        )
        join = partial(
            jax.tree.map, lambda *arrays: np.swapaxes(np.concatenate(arrays), 0, 1)
        )
        sites, diverging, num_steps = join(*parts)
        counts = int(diverging.sum()), float(num_steps.mean())
        return Fit(sites, *counts, warm - start, seconds, processor_seconds)


# --------------------------------------------------------------------------------------
# summaries


def predictor(net: Any, data: Any) -> Callable:
    """Draws of parameters (C, S, ...) -> the function at test points (C, S, 50), batch
    norm as in training.
    """
    import jax

    x, x_train = data.x_test[:TEST_POINTS], data.x_train

    def predict(params: Mapping[str, Any]) -> Any:
        return net.apply(params, x, net.statistics(params, x_train))[..., 0]

    over_draws = jax.jit(lambda params: jax.lax.map(predict, params))
    paths = net.param_shapes(data.x_train.shape[1:])

    def function(sites: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.stack(
            [
                over_draws({path: sites[f"net/{path}"][c] for path in paths})
                for c in range(len(sites["sigma"]))
            ]
        )

    return function


def place_on_orbit(p: float, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distribution function of the position of a ReLU unit on its orbit, given the
    product of a and b.

    u = sqrt(a / b) is generalized inverse Gaussian of order p, u ~
    ``scipy.stats.geninvgauss(p, sqrt(a b))``; a and b are the squared norms of the
    standardized weights in and out, p half the difference of their numbers. By the
    trapezoid rule in log u, where the density is log-concave: SciPy's quadrature takes
    one number at a time.
    """
    x, root = 0.5 * np.log(a / b), np.sqrt(a * b)
    mode = np.arcsinh(p / root)
    reach = np.minimum(12.0 / np.sqrt(np.hypot(p, root)), 12.0)

    def mass(below: np.ndarray) -> np.ndarray:
        t = np.linspace(mode - reach, below, 401)
        return np.trapezoid(
            np.exp(p * (t - mode) - root * (np.cosh(t) - np.cosh(mode))), t, axis=0
        )

    return mass(np.clip(x, mode - reach, mode + reach)) / mass(mode + reach)


def relu_places(sites: Mapping[str, np.ndarray]) -> np.ndarray:
    """The same for every unit of the ReLU MLP (C, S, U): kernels are N(0, s^2 /
    fan_in), biases N(0, 1).
    """
    sites = {name: value.astype(float) for name, value in sites.items()}
    into, out = sites[FIRST], sites["net/Dense_1.kernel"]
    scale_in, scale_out = (
        sites[f"net/Dense_{i}.kernel_scale"][..., None] for i in (0, 1)
    )
    fan_in, fan_out = into.shape[2], out.shape[2]
    a = (into**2).sum(2) * fan_in / scale_in**2 + sites["net/Dense_0.bias"] ** 2
    b = (out**2).sum(3) * fan_out / scale_out**2
    return place_on_orbit(0.5 * (fan_in + 1 - out.shape[3]), a, b)


def statistics_of(net: str, fit: Fit, symmetries: list) -> dict[str, np.ndarray]:
    """The quantities of the table and the figure: name -> (C, S, U)."""
    from numpyro_bnn import symmetry

    def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.asarray(a, float) for a in arrays], -1)

    def only(kind: type) -> list:
        return [s for s in symmetries if isinstance(s, kind)]

    if net == "relu":
        rescale = only(symmetry.Rescale)
        ratio = joined(symmetry.orbit_coordinates(fit.sites, rescale).values())
        product = np.log(joined(symmetry.invariants(fit.sites, rescale).values()))
        scales = [name for name in fit.sites if name.endswith(".kernel_scale")]
        found = {"log norm": 0.5 * (ratio + product), "log ratio": ratio}
        found |= {"place": relu_places(fit.sites), "log product": product}
    else:
        found = {
            "log norm": joined(
                symmetry.orbit_coordinates(fit.sites, only(symmetry.Scale)).values()
            )
        }
        scales = [s.scale[0].site for s in only(symmetry.JointScale)]
    return found | {
        "log s": np.log(joined(fit.sites[name][..., None] for name in scales))
    }


def effective(values: np.ndarray) -> np.ndarray:
    """Effective sample sizes (U,); what never moves has none."""
    from numpyro.diagnostics import effective_sample_size

    with np.errstate(invalid="ignore", divide="ignore"):
        return np.maximum(np.nan_to_num(effective_sample_size(values)), 0.0)


def summarize(
    fit: Fit, values: Mapping[str, np.ndarray], function: np.ndarray
) -> dict[str, Any]:
    from numpyro_bnn import metrics

    ess, draws = {}, function.shape[0] * function.shape[1]
    for name, array in {**values, "function": function.astype(float)}.items():
        found = effective(array)
        ess[name] = {
            f"{which}_per_{unit}": float(number / size)
            for which, number in (("median", np.median(found)), ("min", np.min(found)))
            for unit, size in (("draw", draws), ("second", fit.processor_seconds))
        }
    rhat = metrics.function_space(function).max_rhat
    scale = values["log s"][..., 0]
    first = max(float(effective(scale)), 1.0)
    return {
        "ess": ess,
        "scale_mean": float(scale.mean()),
        "scale_mcse": float(scale.std() / np.sqrt(first)),
        "rhat": rhat if math.isfinite(rhat) else None,
        **{name: value for name, value in fit._asdict().items() if name != "sites"},
    }


# --------------------------------------------------------------------------------------
# tables, figures


def cells(row: Mapping[str, Any], net: str) -> dict[str, str]:
    """One line of a table."""

    def pair(name: str, unit: str) -> str:
        digits = 3 if unit == "draw" else 1
        return " / ".join(
            f"{row['ess'][name][f'{which}_per_{unit}']:.{digits}f}"
            for which in ("median", "min")
        )

    line = {"seed": str(row["seed"]), "way": row["way"]}
    orbit = ["log ratio", "place", "log product"] if net == "relu" else []
    line |= {
        f"{name}, /draw": pair(name, "draw")
        for name in ("log norm", *orbit, "log s", "function")
    }
    line |= {
        f"{name}, /s": pair(name, "second")
        for name in ("log norm", *orbit[:1], "log s", "function")
    }
    line["divergent"], line["tree"] = str(row["divergences"]), f"{row['mean_tree']:.0f}"
    line["first log s"] = f"{row['scale_mean']:.2f} ± {row['scale_mcse']:.2f}"
    line["R-hat f"] = "-" if row["rhat"] is None else f"{row['rhat']:.2f}"
    return line


def table(rows: list[Mapping[str, Any]], net: str) -> str:
    lines = [cells(row, net) for row in rows]
    widths = {
        name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0]
    }

    def written(line: Mapping[str, str]) -> str:
        return (
            "| "
            + " | ".join(line[name].ljust(width) for name, width in widths.items())
            + " |"
        )

    rule = "| " + " | ".join("-" * width for width in widths.values()) + " |"
    return "\n".join(
        [written({name: name for name in widths}), rule, *map(written, lines)]
    )


def report(runs: list[Mapping[str, Any]]) -> str:
    """All tables as Markdown, from the contents of the JSON files."""
    name = "symmetries"
    parts = [
        "# Three ways to sample networks with symmetries",
        NOTES.format(exact=EXACT_MEAN),
        f"<!-- table of {name}: begin -->",
    ]
    for run in runs:
        rows, settings, machine = run["rows"], run["settings"], run["machine"]
        versions = ", ".join(
            f"{name} {number}" for name, number in run["versions"].items()
        )
        parts.append(
            f"## {run['dataset']}, {run['num_train']} training rows, "
            f"{run['num_features']} inputs\n\n"
            f"NUTS, {settings['num_chains']} chains × ({settings['num_warmup']} + "
            f"{settings['num_samples']}) "
            f"transitions, tree depth at most {settings['max_tree_depth']}, "
            f"{settings['width']} hidden units "
            f"({settings['residual_width']} in the residual network). "
            f"{machine['platform'].partition('-')[0]}, "
            f"{machine['cores']} cores, {versions}."
        )
        for net in dict.fromkeys(row["net"] for row in rows):
            own = [row for row in rows if row["net"] == net]
            parts.append(f"### {run['dataset']}: {NETS[net]}\n\n{table(own, net)}")
    parts.append(f"<!-- table of {name}: end -->")
    return "\n\n".join(parts) + "\n"


def draw_trace(
    axis: Any, values: np.ndarray, exact: tuple[float, float, float] | None
) -> None:
    """Trace of the first unit, one color per chain; a band and a line if interval and
    mean are known.
    """
    from numpyro_bnn import metrics

    if exact:
        low, middle, high = exact
        axis.axhspan(low, high, color="#E4E4E4", linewidth=0, zorder=0)
        axis.axhline(middle, color="black", linewidth=0.6, zorder=3)
    for chain, color in zip(values[..., 0], ("#0072B2", "#D55E00"), strict=False):
        axis.plot(chain, color=color, linewidth=0.5, alpha=0.8)
    mixing = metrics.function_space(values[..., :1])
    text = f"R-hat {mixing.rhat[0]:.2f}, ESS {mixing.ess_bulk[0]:.0f}"
    axis.set_title(text, loc="left", fontsize=7, pad=2)
    axis.set_xlim(0, values.shape[1] - 1)


def draw_figure(
    net: str, traces: Mapping[str, Mapping[str, np.ndarray]], path: Path
) -> Path:
    """Traces of the first unit and the first scale, three ways side by side, one color
    per chain.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {
        "log norm": "log norm of a unit",
        "log ratio": r"log $|w_{in}|/|w_{out}|$",
        "log s": "log scale",
    }
    names = [name for name in labels if name in next(iter(traces.values()))]
    low, high = EXACT_INTERVAL
    exact = {} if net == "relu" else {"log s": (low, EXACT_MEAN, high)}
    size = (7.0, 0.5 + 1.25 * len(names))
    options = {"sharex": True, "sharey": "row", "layout": "constrained"}
    settings = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(
            len(names), len(traces), figsize=size, squeeze=False, **options
        )
        for place, (way, values) in enumerate(traces.items()):
            column, shown = (
                axes[:, place],
                labels if place == 0 else dict.fromkeys(labels, ""),
            )
            for axis, name in zip(column, names, strict=True):
                draw_trace(axis, values[name][:2], exact.get(name))
                axis.set_ylabel(shown[name])
            column[-1].set_xlabel("draw")
            column[0].set_title(
                f"{way}\n{column[0].get_title(loc='left')}", loc="left", fontsize=7
            )
        if exact:
            axes[-1, 0].text(0, low, " exact, 90 %", fontsize=7, va="bottom")
        figure.savefig(path, dpi=200)
    plt.close(figure)
    return path


# --------------------------------------------------------------------------------------
# script


def compare(
    data: Any, args: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], list[Path]]:
    rows, saved = [], []
    for net_name in args.nets:
        net = make_net(net_name, args)
        symmetries, function, traces = (
            symmetries_of(net, data),
            predictor(net, data),
            {},
        )
        for way in args.ways:
            sampler = Sampler(make_kernel(way, net, symmetries, data, args), data, args)
            for seed in args.seeds:
                fit = sampler.run(seed)
                print(
                    f"{NETS[net_name]}, {way}, seed {seed}: {fit.seconds:.1f} s",
                    flush=True,
                )
                values = statistics_of(net_name, fit, symmetries)
                rows.append({"net": net_name, "way": way, "seed": seed})
                rows[-1] |= summarize(fit, values, function(fit.sites))
                traces.setdefault(way, values)
        saved.append(
            draw_figure(net_name, traces, folder / f"symmetries_{net_name}.png")
        )
        print(
            "\n" + table([row for row in rows if row["net"] == net_name], net_name),
            flush=True,
        )
    return rows, saved


def settings_of(data: Any, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "dataset": data.name,
        "num_train": len(data.y_train),
        "num_features": data.x_train.shape[1],
        "settings": options_of(args),
        **environment([]),
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    if args.summarize:
        runs = [json.loads(path.read_text()) for path in args.summarize]
        saved = []
    else:
        folder = writable_folder(args.output)
        data = load_data(args)
        print(
            f"{data}\n{args.num_chains} chains of {args.num_warmup} + "
            f"{args.num_samples} transitions"
        )
        rows, saved = compare(data, args, folder)
        runs = [{**settings_of(data, args), "rows": rows}]
        saved.append(folder / "symmetries.json")
        saved[-1].write_text(json.dumps(runs[0], indent=1) + "\n")
    if args.table:
        writable_folder(args.table.parent)
        args.table.write_text(report(runs))
        saved.append(args.table)
    print("written: " + ", ".join(map(str, saved)))
    return [row for run in runs for row in run["rows"]]


if __name__ == "__main__":
    main()
