"""Reference numbers of laplace-torch (`tests/theory/test_laplace_torch.py`), and times
of its precision beside ours.

Run it where `torch` and `laplace-torch` are installed; it imports nothing else:

    cd examples/benchmarks
    python laplace_torch.py reference --output ../../tests/theory/laplace_torch.json
    python laplace_torch.py torch --structures kron  # processor seconds

and, where this package is, `python -m examples.benchmarks.laplace_torch ours
--structures kron`. Weights and data of the timing are random, since the cost does not
depend on them.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np

WIDTHS = {"normal": (4, 6, 5, 1), "categorical": (4, 6, 5, 3)}
ROWS, NEW, PRIOR_PRECISION, NOISE = 40, 7, 2.0, 0.3
TIMED = (784, 400, 400, 10)
STRUCTURES = {
    "full": ("all", "full"),
    "kron": ("all", "kron"),
    "diag": ("all", "diag"),
    "last": ("last_layer", "full"),
}


def data(likelihood, widths, rows, seed=0):
    """Inputs, targets and weights (in, out) and biases by layer."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, widths[0])).astype(np.float32)
    y = (
        rng.normal(size=(rows, widths[-1]))
        if likelihood == "normal"
        else rng.integers(0, widths[-1], size=rows)
    )
    sizes = itertools.pairwise(widths)
    layers = [
        (rng.normal(size=(i, o)) / np.sqrt(i), 0.3 * rng.normal(size=o))
        for i, o in sizes
    ]
    return x, y, [(w.astype(np.float32), b.astype(np.float32)) for w, b in layers]


def torch_laplace(likelihood, widths, rows, name, batch_size, double):
    """A fitted Laplace object of laplace-torch, and the seconds it took."""
    import torch
    from laplace import Laplace

    torch.set_default_dtype(torch.float64 if double else torch.float32)
    x, y, layers = data(likelihood, widths, rows)
    modules = []
    for w, b in layers:
        layer = torch.nn.Linear(*w.shape)
        layer.weight.data, layer.bias.data = (
            torch.tensor(v, dtype=torch.get_default_dtype()) for v in (w.T.copy(), b)
        )
        modules += [layer, torch.nn.Tanh()]
    kind = torch.get_default_dtype() if likelihood == "normal" else torch.long
    rows = torch.utils.data.TensorDataset(
        torch.tensor(x, dtype=torch.get_default_dtype()), torch.tensor(y, dtype=kind)
    )
    subset, structure = STRUCTURES[name]
    options = {"sigma_noise": NOISE} if likelihood == "normal" else {}
    task = "regression" if likelihood == "normal" else "classification"
    la = Laplace(
        torch.nn.Sequential(*modules[:-1]),
        task,
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=PRIOR_PRECISION,
        **options,
    )
    started = time.process_time()
    la.fit(torch.utils.data.DataLoader(rows, batch_size=batch_size))
    return la, time.process_time() - started


def reference():
    """Means and covariances of the linearized outputs at new inputs, and the log
    evidence.
    """
    import torch

    found = {}
    for likelihood, widths in WIDTHS.items():
        new = data(likelihood, widths, NEW, seed=1)[0]
        for name in STRUCTURES:
            la, _ = torch_laplace(likelihood, widths, ROWS, name, ROWS, True)
            mean, cov = la._glm_predictive_distribution(
                torch.tensor(new, dtype=torch.float64)
            )
            evidence = float(la.log_marginal_likelihood())
            found[f"{likelihood} {name}"] = {
                "mean": mean.tolist(),
                "covariance": cov.tolist(),
                "log_evidence": evidence,
            }
    return found


def time_torch(name, rows, batch_size):
    """Processor seconds of the precision and of the linearized prediction
    of one batch.
    """
    import torch

    la, seconds = torch_laplace("categorical", TIMED, rows, name, batch_size, False)
    x = torch.tensor(data("categorical", TIMED, batch_size)[0])
    started = time.process_time()
    la(x, link_approx="probit")
    return {"fit": seconds, "predict": time.process_time() - started}


def time_ours(name, rows, batch_size):
    """The same with `AutoLaplace`: the first call compiles, the second does not."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import numpyro_bnn as bnn
    from numpyro_bnn import guides, nn

    def prior(name, shape):
        return dist.Normal(0.0, PRIOR_PRECISION**-0.5).expand(shape).to_event()

    def model(x, y=None, batch_size=None):
        net = bnn.random_network(
            "net", nn.MLP(list(TIMED[1:]), "tanh"), x.shape[1:], prior
        )
        with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
            numpyro.sample(
                "y", dist.Categorical(logits=net(x[i])), obs=None if y is None else y[i]
            )

    x, y, layers = data("categorical", TIMED, rows)
    start = {}
    for i, (w, b) in enumerate(layers):
        start |= {f"net/Dense_{i}.kernel": w, f"net/Dense_{i}.bias": b}
    structure, sites = ("full", "net/Dense_2.*") if name == "last" else (name, None)
    guide = guides.AutoLaplace(model, structure, sites)
    found = {}
    for label in ("first", "second"):
        began = time.process_time()
        options = {
            "num_epochs": 0,
            "init_params": start,
            "batch_size": batch_size,
            "progress_bar": False,
        }
        fit = jax.block_until_ready(guide.run(jax.random.key(0), x, y, **options))
        middle = time.process_time()
        jax.block_until_ready(guide.predictive(fit.params, jnp.asarray(x[:batch_size])))
        found[label] = {"fit": middle - began, "predict": time.process_time() - middle}
    return found


def parse(argv=None):
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.laplace_torch",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "what",
        choices=["reference", "torch", "ours"],
        help="reference numbers, or times of either",
    )
    parser.add_argument(
        "--structures",
        nargs="+",
        default=["last", "kron", "diag"],
        choices=list(STRUCTURES),
    )
    parser.add_argument("--rows", type=int, default=2000, help="rows of the times")
    parser.add_argument(
        "--batch-size", type=int, default=200, help="rows of a minibatch of the times"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output/laplace_torch.json"),
        help="JSON file",
    )
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    if args.what == "reference":
        found = reference()
    else:
        timed = {"torch": time_torch, "ours": time_ours}[args.what]
        found = {
            name: timed(name, args.rows, args.batch_size) for name in args.structures
        }
    args.output.write_text(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
