"""UCI regression sets with the standard splits: any method, any split, one line of JSON
each.

A run can be interrupted: results in the file are not computed again, and further sets,
splits, methods or heads are added to it. All networks have a hidden layer of 50 ReLU
units (100 for protein; the deep recipe three of 16) and hierarchical priors. The heads
are one noise scale for all rows (`homo`), an output for it (`hetero`), one scale of a
Student's t (`tails`), or an output for that scale (`both`). With `--docs` the tables of
a page are made from the file. Half of the time of a small set is compilation; with
JAX's cache on disk (the environment variable `JAX_COMPILATION_CACHE_DIR`) the splits of
a set share it.

    python -m examples.benchmarks.uci --data FOLDER --sets boston yacht --methods mclmc
    nngp --splits 5 python -m examples.benchmarks.uci --methods none --output
    docs/uci.jsonl --docs docs/tables/uci.md
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm

from examples import loaders
from examples.benchmarks import boosting
from examples.benchmarks.shared import environment, one_device_per_core
from examples.benchmarks.uci_gap import COLUMNS, KINDS, gap_tables
from examples.benchmarks.uci_table import LARGE, PUBLISHED, picture
from examples.benchmarks.uci_table import tables as standard_tables
from examples.shared import (
    at_least,
    between_marks,
    observations_of_members,
    writable_file,
)

HEADS = ("homo", "hetero", "tails", "both")
DEEP = (16, 16, 16)  # widths of a network with about as many weights as one of 50 units
CHAINS = 8
RATINGS = (
    "wine",
)  # sets whose targets are a few values, for which heavy tails are refused


def model_of(data: Any, head: str, widths: Sequence[int] = ()) -> Callable:
    import numpyro_bnn as bnn

    widths = widths or (100 if data.name == "protein" else 50,)
    hetero = head in ("hetero", "both")
    net = bnn.nn.MLP([*widths, 1 + hetero], "relu")
    options = {"heteroscedastic": hetero, "heavy_tails": head in ("tails", "both")}
    return bnn.models.regression(net, bnn.priors.Hierarchical(), **options)


# --------------------------------------------------------------------------------------
# methods


def sample(
    kernel: Any,
    data: Any,
    args: argparse.Namespace,
    warmup: int,
    draws: int,
    **call: Any,
) -> Any:
    """A finished ``MCMC`` of chains that are vectorized and distributed over all cores.

    The data are arguments of the compiled program, so it is the same for all splits of
    a set and comes from JAX's cache.

    :param call: arguments of the model after the data, by name.
    """
    from numpyro.infer import MCMC

    from numpyro_bnn import infer

    warmup, draws = (
        max(2, round(args.effort * warmup)),
        max(5, round(args.effort * draws)),
    )
    options = {
        "num_chains": CHAINS // 2 if data.name in LARGE else CHAINS,
        "chain_method": infer.parallel_vectorized,
        # the size of a minibatch must be known to the compiler
        "jit_model_args": not call,
        "progress_bar": False,
    }
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, **options)
    mcmc.run(jax.random.key(args.seed), data.x_train, data.y_train, **call)
    return mcmc


def mclmc(data: Any, head: str, args: argparse.Namespace) -> dict[str, Any]:
    """A deep ensemble, and microcanonical chains around its members, from one run."""
    import optax

    from numpyro_bnn import infer

    steps, each, warmup, draws = (
        (3000, 20, 100, 150) if data.name in LARGE else (4000, 50, 400, 500)
    )
    steps = max(10, round(args.effort * steps))
    schedule = optax.cosine_decay_schedule(0.02, steps)
    warm = infer.WarmStart(
        0.3, num_steps=steps, optimizer=optax.adam(schedule), held_out=0.1, spread=0.5
    )
    kernel = infer.MCLMC(model_of(data, head), steps_per_draw=each, warm_start=warm)
    mcmc = sample(kernel, data, args, warmup, draws)
    return {
        "deep ensemble": scored([mcmc], data, members=True),
        "MCLMC": scored([mcmc], data),
    }


def recipe(
    data: Any, head: str, args: argparse.Namespace, widths: Sequence[int] = ()
) -> dict[str, Any]:
    """A deep ensemble and chains around its members, by the recipe of the package."""
    mcmc = ensemble(model_of(data, head, widths), data, args, CHAINS)
    shape = f" {'x'.join(map(str, widths))}" if widths else ""
    return {
        f"members{shape}": scored([mcmc], data, members=True),
        f"recipe{shape}": scored([mcmc], data),
    }


def mixed(data: Any, head: str, args: argparse.Namespace) -> dict[str, Any]:
    """Half of the chains with the deep network and one noise scale, half with an output
    for the noise.
    """
    models = (
        model_of(data, "homo" if data.name in RATINGS else head, DEEP),
        model_of(data, "hetero"),
    )
    fits = [ensemble(model, data, args, CHAINS // 2) for model in models]
    return {
        "members mixed": scored(fits, data, members=True),
        "recipe mixed": scored(fits, data),
    }


def ensemble(model: Callable, data: Any, args: argparse.Namespace, chains: int) -> Any:
    """A finished run of the recipe; large sets have half the chains and a fifth of the
    gradients.
    """
    from numpyro_bnn import infer

    large, options = data.name in LARGE, {"jit_model_args": True, "progress_bar": False}
    gradients = max(100, round(args.effort * (12_000 if large else 60_000)))
    mcmc = infer.ensemble(model, gradients, num_chains=chains // (1 + large), **options)
    mcmc.run(jax.random.key(args.seed), data.x_train, data.y_train)
    return mcmc


def nuts(data: Any, head: str, args: argparse.Namespace) -> dict[str, Any]:
    """NUTS on the non-centered model, with moves along the symmetries of the network
    after each transition.
    """
    from numpyro.infer import NUTS

    from numpyro_bnn import infer, symmetry

    model = model_of(data, head)
    found = symmetry.find(model, data.x_train, data.y_train)
    kernel = infer.OrbitMoves(NUTS(model, max_tree_depth=8), found)
    return {"NUTS + OrbitMoves": scored([sample(kernel, data, args, 400, 400)], data)}


def sghmc(data: Any, head: str, args: argparse.Namespace) -> dict[str, Any]:
    from numpyro_bnn import infer

    warm = infer.WarmStart(held_out=0.1, spread=0.5)
    kernel = infer.SGHMC(model_of(data, head), steps_per_draw=100, warm_start=warm)
    batch = min(64, len(data.y_train))
    return {
        "SGHMC": scored([sample(kernel, data, args, 300, 300, batch_size=batch)], data)
    }


def variational(data: Any, head: str, args: argparse.Namespace) -> dict[str, Any]:
    """Bayes by Backprop, and coupling flows over scales and output weights that start
    where it ended.
    """
    import optax
    from numpyro.infer import SVI, init_to_value

    import numpyro_bnn as bnn

    model, call, steps = (
        model_of(data, head),
        (data.x_train, data.y_train),
        max(10, round(args.effort * 10_000)),
    )
    found, start = {}, None
    for name in ("AutoMeanField", "AutoCoupling"):
        guide = bnn.guides.AutoMeanField(model)
        if start is not None:
            blocks = [
                ("*_scale", "sigma", "net/Dense_1*")
                if head == "homo"
                else ("*_scale", "net/Dense_1*")
            ]
            options = {"init_loc_fn": init_to_value(values=start), "init_scale": 0.02}
            guide = bnn.guides.AutoCoupling(model, blocks=blocks, **options)
        rate = optax.cosine_decay_schedule(0.01 if start is None else 0.003, steps)
        svi = SVI(model, guide, optax.adam(rate), bnn.guides.TraceLocalReparam_ELBO())
        loop = {"progress_bar": False, "stable_update": True}
        fit = bnn.guides.fit(svi, jax.random.key(args.seed), steps, *call, **loop)
        found[name] = scored([fit], data, guide=guide, args=call, num_samples=1000)
        start = guide.median(fit.params)
    return found


def adf(data: Any, head: str, args: argparse.Namespace) -> dict[str, Any]:
    """Probabilistic backpropagation, 40 passes."""
    from examples.probabilistic_backpropagation import model
    from numpyro_bnn import guides

    pbp, widths = guides.AutoADF(model), (100 if data.name == "protein" else 50,)
    epochs = max(1, round(args.effort * 40))
    key, loop = jax.random.key(args.seed), {"num_epochs": epochs, "progress_bar": False}
    fit = pbp.run(key, data.x_train, data.y_train, widths=widths, **loop)
    mean, variance = pbp.predictive_moments(fit.params, data.x_test, widths=widths)
    return {"AutoADF": boosting.mixture_scores(mean[None], variance[None], data)}


def nngp(data: Any, head: str, args: argparse.Namespace) -> dict[str, Any]:
    """The Gaussian process of the infinitely wide network, its scales (one for each
    input) fitted.
    """
    from numpyro_bnn import infinite, nn

    net, call = nn.MLP([50, 1], "erf"), (data.x_train, data.y_train)
    found = infinite.prior_fit(
        net, *call, ard=True, max_steps=max(2, round(args.effort * 100))
    )
    gp = infinite.gp_regression(net, *call, noise_sd=found.noise_sd, prior=found.prior)
    predicted = gp.predict(data.x_test, diagonal=True)
    variance = predicted.covariance + found.noise_sd**2
    return {"NNGP": boosting.mixture_scores(predicted.mean[None], variance[None], data)}


# Name -> function, and its heads.
METHODS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "recipe": (recipe, HEADS),
    "deep recipe": (partial(recipe, widths=DEEP), HEADS),
    "mixed recipe": (mixed, HEADS[2:3]),
    "mclmc": (mclmc, HEADS[:2]),
    "nuts": (nuts, HEADS[:2]),
    "sghmc": (sghmc, HEADS[:2]),
    "variational": (variational, HEADS[:2]),
    "adf": (adf, HEADS[:1]),
    "nngp": (nngp, HEADS[:1]),
    "ngboost": (boosting.ngboost, HEADS[1:2]),
    "catboost": (boosting.catboost, HEADS[1:2]),
}
# Methods of packages that are in none of our extras; they are run only if they are
# named.
OTHERS = {"ngboost": ("ngboost", "scikit-learn"), "catboost": ("catboost",)}


# --------------------------------------------------------------------------------------
# scores


def scored(fits: Sequence[Any], data: Any, **options: Any) -> dict[str, float]:
    """Scores at the test points, in the units of the data, of the mixture of several
    fits.
    """
    import numpyro_bnn as bnn

    new = {"x": data.x_test, "y": data.y_test}
    if "guide" not in options:
        options |= {"log_likelihood": False, "posterior_predictive": False}
    tests = [
        bnn.to_inference_data(fit, predictions=new, **options)["predictions"]
        for fit in fits
    ]
    mean, log_likelihood = (
        np.concatenate([t[name] for t in tests])
        for name in ("y_mean", "y_log_likelihood")
    )
    if "members" in options:
        y = np.concatenate([observations_of_members(fit, new) for fit in fits])
    else:
        y = np.concatenate([test["y"] for test in tests])
    scale = float(data.y_scaler.scale_factor)
    return {
        "rmse": scale * bnn.metrics.rmse(mean.mean((0, 1)), data.y_test).value,
        "log_likelihood": bnn.metrics.lppd(log_likelihood).value - float(np.log(scale)),
        "coverage": bnn.metrics.interval_coverage(y, data.y_test, level=0.9).coverage,
    }


# --------------------------------------------------------------------------------------
# runner


def plan(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The jobs, ordered by split, so that an interrupted run has the same splits of all
    sets.

    The number of a split along an input is that of the input.
    """
    kind = {} if args.splits_of == "standard" else {"splits_of": args.splits_of}
    return [
        {"set": name, "split": split, "run": run, "head": head, **kind}
        for split in range(args.splits)
        for name in args.sets
        for run in args.methods
        for head in args.heads
        if head in METHODS[run][1] and split in splits_of(name, args.splits_of)
        if not (head in ("tails", "both") and name in RATINGS and run != "mixed recipe")
    ]


def splits_of(name: str, kind: str) -> Sequence[int]:
    return (
        COLUMNS.get(name, ())
        if kind in KINDS
        else range(5 if name == "protein" else 20)
    )


def tables(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """All tables by name."""
    kept = list(lines)
    standard = [line for line in kept if "splits_of" not in line]
    return (standard_tables(standard) if standard else {}) | gap_tables(kept)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The results so far; a line that was cut off by an interruption is ignored."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def compute(job: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each method of a job."""
    if "splits_of" in job:
        raw = loaders.load_uci_gap(
            job["set"], job["split"], job["splits_of"], args.data
        )
    else:
        raw = loaders.load_uci(job["set"], job["split"], args.data)
    data = loaders.standardize(raw)
    start = time.perf_counter()
    found = METHODS[job["run"]][0](data, job["head"], args)
    about = {
        "seconds": time.perf_counter() - start,
        "effort": args.effort,
        "seed": args.seed,
    }
    return [
        job | {"method": method} | about | scores for method, scores in found.items()
    ]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    writable_file(args.output)
    one_device_per_core()
    key = ("set", "split", "run", "head", "effort", "seed", "splits_of")
    about = {"effort": args.effort, "seed": args.seed}
    done = {tuple(map(line.get, key)) for line in lines_of(args.output)}
    jobs = [job for job in plan(args) if tuple(map((job | about).get, key)) not in done]
    bar = tqdm.tqdm(jobs, disable=not args.progress_bar)
    with args.output.open("a") as file:
        if not args.output.read_text().endswith("\n"):
            file.write("\n")  # a line that was cut off stays separate
        for number, job in enumerate(bar):
            if number % 20 == 19:
                jax.clear_caches()  # or the programs of past jobs fill the memory
            bar.set_description(" ".join(map(str, job.values())))
            lines, packages = compute(job, args), OTHERS.get(job["run"], ())
            file.write(
                "".join(
                    f"{json.dumps(line | environment(packages))}\n" for line in lines
                )
            )
            file.flush()
    lines = lines_of(args.output)
    made = tables(lines)
    for text in made.values():
        print(f"\n{text}")
    for page in args.docs:
        for name, text in made.items():
            if f"table of {name}: begin" in page.read_text():
                between_marks(page, text, name)
    if args.figure:
        picture([line for line in lines if "splits_of" not in line], args.figure)
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.uci",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sets, methods = list(PUBLISHED), [*METHODS, "none"]
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument(
        "--sets", nargs="+", choices=sets, default=sets, help="data sets"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=methods,
        default=[name for name in METHODS if name not in OTHERS],
        help="what to run; none: tables only",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        choices=HEADS,
        default=list(HEADS),
        help="noise of the model",
    )
    parser.add_argument(
        "--splits", type=int, default=20, help="the first so many splits"
    )
    parser.add_argument(
        "--splits-of",
        choices=("standard", *KINDS),
        default="standard",
        help="gap and tail: along each input of boston, concrete, energy and yacht",
    )
    parser.add_argument(
        "--effort",
        type=float,
        default=1.0,
        help="factor of all numbers of steps and draws",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of starts and draws")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/uci.jsonl"),
        help="file to which results are added",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        nargs="+",
        default=[],
        help="pages whose tables are to be replaced",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        help="file of a plot of ours beside the published figures",
    )
    parser.add_argument("--no-progress-bar", dest="progress_bar", action="store_false")
    args = parser.parse_args(argv)
    args.methods = [name for name in args.methods if name != "none"]
    at_least(parser, args, ("splits",))
    if not args.effort > 0:
        parser.error("--effort must be above 0")
    return args


if __name__ == "__main__":
    main()
