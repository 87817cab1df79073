"""Neal's regression `rdata`: a posterior with two modes, both visited by every chain.

A small network with hierarchical priors. On the left, where there are no data, the
function may fall or turn up. Plain NUTS stays in the mode where it starts. Here the
output layer and the precisions of the hidden layer are integrated out, and hidden units
that the data do not need are redrawn from their prior. The script prints the scores of
each chain and of Neal's run, and how often the function turns up.

    python -m examples.two_modes --data FOLDER
    python -m examples.two_modes --help
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples.neal import KERNEL, load_data, new_figure, save_figure
from examples.shared import at_least, between_marks, markdown, writable_folder

# The file rlog.net of his ex-netgp after 50,000 iterations of 2,000 leapfrogs: average
# log probability of the test targets and squared error, each with its standard error.
NEAL = ((0.830, 0.022), (0.01873, 0.00335))
SCORES = "log probability {:6.3f} ± {:.3f}   squared error {:.4f} ± {:.4f}"
LEFT = np.array(
    [1.75, 0.95]
)  # distances from the smallest training input: f turns up if it is larger at the first


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.two_modes",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, default=None, help="data folder with extra/neal_fbm.npz"
    )
    parser.add_argument(
        "--num-warmup", type=int, default=1000, help="warm-up transitions per chain"
    )
    parser.add_argument(
        "--num-samples",
        type=int,
        default=16_000,
        help="transitions per chain after that",
    )
    parser.add_argument(
        "--kept-draws", type=int, default=1500, help="draws kept per chain, at most"
    )
    parser.add_argument("--num-chains", type=int, default=4, help="chains, vectorized")
    parser.add_argument(
        "--num-moves",
        type=int,
        default=200,
        help="moves of hidden units per transition",
    )
    parser.add_argument("--max-tree-depth", type=int, default=6, help="of NUTS")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of starts and draws, and of simulated data",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output"), help="folder of JSON and figure"
    )
    parser.add_argument("--docs", type=Path, help="page whose table shows the scores")
    args = parser.parse_args(argv)
    at_least(
        parser,
        args,
        (
            "num_warmup",
            "num_samples",
            "kept_draws",
            "num_chains",
            "num_moves",
            "max_tree_depth",
        ),
    )
    return args


def sample(data: Any, args: argparse.Namespace) -> tuple[Any, float]:
    """1 8 1 / ih=0.05:0.5 bh=0.05:0.5 ho=x0.05:0.5 bo=100, noise 0.05:0.5, with linear
    parts integrated out.

    The output layer is drawn exactly for each draw, the precisions of the hidden layer
    are integrated too, and idle hidden units are redrawn from their prior: without
    these moves most chains of 8000 draws saw one mode.
    """
    import jax
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS, init_to_uniform

    import numpyro_bnn as bnn
    from numpyro_bnn import infer, priors

    prior = {
        "Dense_0.*": priors.GammaPrecision(
            0.05, 0.5, fan_in_scaling=False, marginal=True
        ),
        "Dense_1.kernel": priors.GammaPrecision(0.05, 0.5, centered=True),
        "Dense_1.bias": priors.Normal(bias_scale=100.0),
    }

    def model(x, y=None):
        f = bnn.random_network("net", bnn.nn.MLP([8, 1], "tanh"), x.shape[1:], prior)
        precision = numpyro.sample("precision", dist.Gamma(0.25, 0.25 * 0.05**2))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x)[..., 0], precision**-0.5), obs=y)

    hidden = infer.collapse(
        model, ["net/Dense_1.kernel", "net/Dense_1.bias"], data.x_train, data.y_train
    )
    nuts = NUTS(
        hidden,
        max_tree_depth=args.max_tree_depth,
        init_strategy=init_to_uniform(radius=1.0),
    )
    mcmc = MCMC(
        infer.UnitMoves(
            nuts, {KERNEL: 1, "net/Dense_0.bias": 0}, num_moves=args.num_moves
        ),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        thinning=max(1, args.num_samples // args.kept_draws),
        num_chains=args.num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(
        jax.random.key(args.seed),
        data.x_train,
        data.y_train,
        extra_fields=("num_steps", "diverging"),
    )
    jax.block_until_ready(mcmc.get_samples())
    return mcmc, time.perf_counter() - start


def scores_of_chains(
    f: np.ndarray, log_density: np.ndarray, up: np.ndarray, data: Any
) -> dict[str, dict[str, Any]]:
    """Log probability and squared error with standard errors, and share of draws that
    turn up, printed.
    """
    from numpyro_bnn import metrics

    found = {}
    groups = [(f"chain {i + 1}", slice(i, i + 1)) for i in range(len(f))] + [
        ("all chains", slice(None))
    ]
    for name, chains in groups:
        of_target = metrics.lppd(log_density[chains])
        square = (f[chains].mean((0, 1)) - data.y_test) ** 2
        error = float(square.mean()), float(square.std(ddof=1) / len(square) ** 0.5)
        share = float(up[chains].mean())
        found[name] = {
            "log_probability": (of_target.value, of_target.standard_error),
            "squared_error": error,
        }
        found[name]["turns_up"] = share
        numbers = SCORES.format(of_target.value, of_target.standard_error, *error)
        print(f"{name:12} {numbers}   turns up in {share:.2%} of the draws")
    if data.name == "rdata":  # his own cases, not simulated ones
        print(f"{'Neal':12} {SCORES.format(*NEAL[0], *NEAL[1])}")
    return found


def table(report: dict[str, Any]) -> str:
    """Markdown: a row for each chain, for all of them, and for Neal's run."""
    found = {
        **report["test"],
        "Neal's run": {
            "log_probability": NEAL[0],
            "squared_error": NEAL[1],
            "turns_up": None,
        },
    }
    rows = []
    for name, row in found.items():
        scores = (
            "{:.3f} ± {:.3f}".format(*row["log_probability"]),
            "{:.4f} ± {:.4f}".format(*row["squared_error"]),
        )
        rows.append(
            (
                name,
                *scores,
                "-" if row["turns_up"] is None else f"{row['turns_up']:.2%}",
            )
        )
    return markdown(("", "log probability", "squared error", "turns up"), rows)


def draw_modes(
    x: np.ndarray,
    f: np.ndarray,
    left: np.ndarray,
    up: np.ndarray,
    data: Any,
    path: Path,
) -> None:
    """Functions of both modes with the data, and the left end of the function in each
    chain, draw by draw.
    """
    figure, (functions, trace) = new_figure(2, (9.6, 3.8))
    for mode, color, label in ((~up, "C0", "falls"), (up, "C1", "turns up")):
        for i, one in enumerate(f[mode][:: max(1, mode.sum() // 30)][:30]):
            functions.plot(
                x,
                one,
                color=color,
                linewidth=0.7,
                alpha=0.6,
                label=None if i else label,
            )
    functions.scatter(
        data.x_train[:, 0],
        data.y_train,
        s=8,
        color="black",
        zorder=3,
        label="training cases",
    )
    reach = 2 * np.abs(data.y_train).max()
    functions.set(
        xlabel="x",
        ylabel="f(x)",
        ylim=(-4 * reach, 2 * reach),
        title="functions of both modes",
    )
    functions.legend()
    for chain, values in enumerate(left):
        trace.plot(values, linewidth=0.6, label=f"chain {chain + 1}")
    trace.set(
        xlabel="kept draw",
        ylabel="f at the left edge",
        title="which mode each chain is in",
    )
    trace.set_yscale("symlog")
    trace.legend(ncols=2)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    import jax

    import numpyro_bnn as bnn

    args = parse(argv)
    folder = writable_folder(args.output)
    data = load_data("rdata", args)
    low, high = data.x_train.min(), data.x_train.max()
    grid = np.linspace(low - 2, high + 1, 80)
    extra = np.concatenate([low - LEFT, grid])
    new = {
        "x": np.append(data.x_test[:, 0], extra)[:, None],
        "y": np.append(data.y_test, 0 * extra),
    }
    # The scale of the output bias is a thousand times the noise: single precision
    # leaves few digits for the rest.
    with jax.enable_x64(True):
        mcmc, seconds = sample(data, args)
        fields = jax.device_get(mcmc.get_extra_fields())
        found = bnn.to_inference_data(
            mcmc, predictions=new, log_likelihood=False, posterior_predictive=False
        )
    groups = found["predictions"]
    f, log_density = (
        groups[name].values.astype(float) for name in ("y_mean", "y_log_likelihood")
    )
    at_test, left, on_grid = np.split(
        f, [len(data.y_test), len(data.y_test) + 2], axis=-1
    )
    up = left[..., 0] > left[..., 1]
    transitions = args.num_chains * (args.num_warmup + args.num_samples)
    report = {
        "data": repr(data),
        "seconds": seconds,
        "gradients": round(transitions * float(fields["num_steps"].mean())),
        "moves": transitions * args.num_moves,
        "accepted": float(fields["unit_accept_prob"].mean()),
        "diverging": float(fields["diverging"].mean()),
    }
    print(
        f"{data}\n{args.num_chains} chains of {args.num_samples} draws: {seconds:.0f} "
        f"seconds, about"
        f" {report['gradients']:.2g} gradients (Neal's run: 1e8 leapfrogs) and "
        f"{report['moves']:.2g} moves of units,"
        f" {report['accepted']:.0%} accepted; {report['diverging']:.2%} of the draws "
        f"diverged"
    )
    report["test"] = scores_of_chains(
        at_test, log_density[..., : len(data.y_test)], up, data
    )
    draw_modes(grid, on_grid, left[..., 0], up, data, folder / "two_modes.png")
    path = folder / "two_modes.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")
    if args.docs is not None:
        between_marks(args.docs, table(report), "two_modes")
    return report


if __name__ == "__main__":
    main()
