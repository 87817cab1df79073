"""Variational guides on UCI regression sets, compared with NUTS and published figures.

The networks have one hidden layer of 50 units, with learned scales of layers and noise;
the splits are the standard ones. For every guide the script reports the test log
likelihood and RMSE in the units of the data, the ELBO, the distance of its predicted
function from that of NUTS (root mean square over test points, in units of NUTS's sd),
and the mean ratio of the sds. Flows start where the mean field ended; its seconds are
not included in theirs. Writes JSON; with ``--docs`` also the table of a page.

    python -m examples.benchmarks.variational_uci --data FOLDER
        --docs docs/tables/guides.md
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from examples import loaders
from examples.benchmarks.shared import (
    PBP,
    environment,
    mean_and_error,
    options_of,
    put_table,
    write_report,
)
from examples.shared import at_least, markdown, writable_file

# Test log likelihoods and standard errors, one hidden layer of 50 units, 20 standard
# splits: the method of Graves (2011) as printed by Hernandez-Lobato and Adams (2015),
# table 1.
VI = {
    "boston": (-2.903, 0.071),
    "concrete": (-3.391, 0.017),
    "energy": (-2.391, 0.029),
    "yacht": (-3.439, 0.163),
}
PUBLISHED = {name: {"VI": vi, "PBP": PBP[name][1]} for name, vi in VI.items()}
METHODS = ("AutoMeanField", "AutoCoupling", "NUTS")


class Predicted(NamedTuple):
    """Scores on the test points of one split, mean and sd of the function there, and
    the guide's final values.
    """

    log_likelihood: float
    rmse: float
    elbo: float
    mean: np.ndarray
    sd: np.ndarray
    seconds: float
    median: Mapping[str, Any]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.variational_uci",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=list(PUBLISHED),
        default=list(PUBLISHED),
        help="data sets",
    )
    parser.add_argument(
        "--splits", type=int, default=5, help="standard splits used, at most 20"
    )
    parser.add_argument("--width", type=int, default=50, help="hidden units")
    parser.add_argument(
        "--activation", default="tanh", help="activation of the hidden units"
    )
    parser.add_argument(
        "--num-steps", type=int, default=10_000, help="steps of the optimizer"
    )
    parser.add_argument(
        "--num-warmup",
        type=int,
        default=400,
        help="warm-up transitions of NUTS per chain",
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=400,
        help="draws of NUTS per chain, twice that of a guide",
    )
    parser.add_argument("--max-tree-depth", type=int, default=7, help="of NUTS")
    parser.add_argument("--seed", type=int, default=0, help="seed of starts and draws")
    parser.add_argument(
        "--data", type=Path, help="folder of the data; otherwise NUMPYRO_BNN_DATA"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/variational_uci.json"),
        help="JSON file",
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        ("splits", "width", "num_steps", "num_warmup", "num_samples", "max_tree_depth"),
    )
    return args


def make_guide(model: Callable, start: Mapping[str, Any] | None) -> Any:
    """Mean field, or with ``start`` a flow over scales and output weights, which are
    few and far from normal.

    A flow starts at the mean field's medians ``start``, with small scales: from random
    weights its noise switches units off before they have learned anything, and it ends
    below the mean field.
    """
    from numpyro.infer import init_to_value

    from numpyro_bnn import guides

    if start is None:
        return guides.AutoMeanField(model)
    options = {"init_loc_fn": init_to_value(values=start), "init_scale": 0.02}
    return guides.AutoCoupling(
        model, blocks=[("*_scale", "sigma", "net/Dense_1*")], **options
    )


def fit_guide(
    model: Callable,
    data: Any,
    start: Mapping[str, Any] | None,
    args: argparse.Namespace,
) -> tuple[Any, dict[str, Any]]:
    """ArviZ results of a guide, with predictions at the test points, and
    its medians.
    """
    import optax
    from numpyro.infer import SVI

    import numpyro_bnn as bnn

    guide = make_guide(model, start)
    rate = optax.cosine_decay_schedule(0.01 if start is None else 0.003, args.num_steps)
    svi = SVI(model, guide, optax.adam(rate), bnn.guides.TraceLocalReparam_ELBO())
    call = (data.x_train, data.y_train)
    key, loop = (
        jax.random.key(args.seed),
        {"progress_bar": False, "stable_update": True},
    )
    fit = bnn.guides.fit(svi, key, args.num_steps, *call, **loop)
    new = {"x": data.x_test, "y": data.y_test}
    idata = bnn.to_inference_data(
        fit, guide=guide, args=call, num_samples=2 * args.num_samples, predictions=new
    )
    return idata, guide.median(fit.params)


def run_nuts(model: Callable, data: Any, args: argparse.Namespace) -> Any:
    from numpyro.infer import MCMC, NUTS

    import numpyro_bnn as bnn

    mcmc = MCMC(
        NUTS(model, max_tree_depth=args.max_tree_depth),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(args.seed), data.x_train, data.y_train)
    return bnn.to_inference_data(mcmc, predictions={"x": data.x_test, "y": data.y_test})


def learn(
    method: str, data: Any, start: Mapping[str, Any] | None, args: argparse.Namespace
) -> Predicted:
    """One method on one split; a flow from ``start``."""
    import numpyro_bnn as bnn

    net = bnn.nn.MLP([args.width, 1], args.activation)
    model = bnn.models.regression(net, bnn.priors.Hierarchical())
    begin = time.perf_counter()
    if method == "NUTS":
        idata, median = run_nuts(model, data, args), {}
    else:
        idata, median = fit_guide(model, data, start, args)
    seconds = time.perf_counter() - begin
    test, scale = idata["predictions"], float(data.y_scaler.scale_factor)
    mean, sd = (
        np.asarray(part(("chain", "draw")))
        for part in (test["y_mean"].mean, test["y_mean"].std)
    )
    return Predicted(
        log_likelihood=bnn.metrics.lppd(test["y_log_likelihood"]).value
        - float(np.log(scale)),
        rmse=scale * float(np.sqrt(np.mean((mean - data.y_test) ** 2))),
        elbo=idata.attrs.get("elbo", float("nan")),
        mean=mean,
        sd=sd,
        seconds=seconds,
        median=median,
    )


def distance(found: Predicted, reference: Predicted) -> tuple[float, float]:
    """Distance of the mean functions in units of the reference's sd, and the mean ratio
    of the sds.
    """
    gap = np.sqrt(np.mean((found.mean - reference.mean) ** 2)) / np.sqrt(
        np.mean(reference.sd**2)
    )
    return float(gap), float(np.mean(found.sd / reference.sd))


def learn_set(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All methods on all splits of a set."""
    by_method: dict[str, list[tuple]] = {method: [] for method in METHODS}
    for split in range(args.splits):
        data = loaders.standardize(loaders.load_uci(name, split, args.data))
        found = {METHODS[0]: learn(METHODS[0], data, None, args)}
        for method in METHODS[1:]:
            found[method] = learn(method, data, found[METHODS[0]].median, args)
        for method, one in found.items():
            line = (
                one.log_likelihood,
                one.rmse,
                one.elbo,
                *distance(one, found["NUTS"]),
                one.seconds,
            )
            by_method[method].append(line)
    fields = ("log_likelihood", "rmse", "elbo", "mean_distance", "sd_ratio", "seconds")
    return {
        "set": name,
        **{
            m: dict(zip(fields, zip(*lines, strict=True), strict=True))
            for m, lines in by_method.items()
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: means over splits and their standard errors."""

    def pair(values: Any) -> str:
        return "{:.3f} ± {:.3f}".format(*mean_and_error(values))

    heads = [
        "set",
        "method",
        "log likelihood",
        "RMSE",
        "ELBO",
        "mean from NUTS",
        "sd ratio",
        "seconds",
    ]
    lines = []
    for row in rows:
        for method in METHODS:
            at = row[method]
            distances = ("-", "-", "-")
            if method != "NUTS":
                distances = tuple(
                    f"{np.mean(at[field]):.{digits}f}"
                    for field, digits in (
                        ("elbo", 1),
                        ("mean_distance", 2),
                        ("sd_ratio", 2),
                    )
                )
            cells = [
                row["set"],
                method,
                pair(at["log_likelihood"]),
                pair(at["rmse"]),
                *distances,
            ]
            lines.append([*cells, f"{np.mean(at['seconds']):.0f}"])
        for method, (value, error) in PUBLISHED[row["set"]].items():
            published = [
                row["set"],
                f"{method}, published",
                f"{value:.3f} ± {error:.3f}",
            ]
            lines.append([*published, *["-"] * 5])
    return markdown(heads, lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    report: dict[str, Any] = {
        "rows": [],
        "options": options_of(args),
        **environment([]),
    }
    for name in args.sets:
        report["rows"].append(learn_set(name, args))
        print("\n".join(table(report["rows"][-1:]).split("\n")[2:]), flush=True)
        write_report(args.output, report)
    put_table(args.docs, "variational_uci", table(report["rows"]), report)
    return report


if __name__ == "__main__":
    main()
