"""The files of the package that five common workflows use: `python docs/make_ways.py`
writes them to contributing.md.

A file counts if the workflow calls one of its functions; files that are only imported
do not count.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI

import numpyro_bnn as bnn

PAGE = Path(__file__).parent / "contributing.md"
PACKAGE = Path(bnn.__file__).parent
X = jax.random.normal(jax.random.key(0), (12, 2))
Y = X[:, 0]
SHORT = {"num_warmup": 1, "num_samples": 1, "progress_bar": False}


def model(x, y=None, batch_size=None):
    """A regression with one noise, as the README writes it."""
    prior = bnn.priors.Hierarchical()
    net = bnn.random_network(
        "net", bnn.nn.MLP([3, 1]), input_shape=x.shape[-1:], prior=prior
    )
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample(
            "y", dist.Normal(net(x[i])[..., 0], sigma), obs=None if y is None else y[i]
        )


def sgld() -> None:
    """One draw of `SGLD`."""
    mcmc = MCMC(bnn.infer.SGLD(model, step_size=1e-4, steps_per_draw=2), **SHORT)
    mcmc.run(jax.random.key(0), X, Y, batch_size=4)


def orbit_moves() -> None:
    """`MCLMC` in `OrbitMoves`."""
    kernel = bnn.infer.OrbitMoves(
        bnn.infer.MCLMC(model), bnn.symmetry.find(model, X, Y)
    )
    MCMC(kernel, **SHORT).run(jax.random.key(0), X, Y)


def adf() -> None:
    """`AutoADF.run`."""
    bnn.guides.AutoADF(model).run(
        jax.random.key(0), X, Y, num_epochs=1, progress_bar=False
    )


def mean_field() -> None:
    """`SVI` with `AutoMeanField`."""
    guide = bnn.guides.AutoMeanField(model)
    svi = SVI(model, guide, optax.adam(0.01), numpyro.infer.Trace_ELBO())
    svi.run(jax.random.key(0), 2, X, Y, progress_bar=False)


def export() -> Callable[[], None]:
    """`to_inference_data` of a run of NUTS, with predictions."""
    mcmc = MCMC(NUTS(model, max_tree_depth=2), **SHORT)
    mcmc.run(jax.random.key(0), X, Y)

    def way() -> None:
        bnn.to_inference_data(mcmc, predictions={"x": X})

    return way


def files_of(way: Callable[[], None]) -> list[str]:
    """Files of the package with a function that the way calls."""
    seen = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name not in ("<module>", "<lambda>"):
            seen.add(frame.f_code.co_filename)

    jax.clear_caches()
    sys.setprofile(note)
    try:
        way()
    finally:
        sys.setprofile(None)
    inside = [Path(name) for name in seen if Path(name).is_relative_to(PACKAGE)]
    return sorted(str(path.relative_to(PACKAGE)) for path in inside)


def table() -> str:
    """The table of contributing.md: a row for each way."""
    ways = {f.__doc__: f for f in (sgld, orbit_moves, adf, mean_field)} | {
        export.__doc__: export()
    }
    rows = ["| way | files | which |", "| --- | --- | --- |"]
    for name, way in ways.items():
        found = files_of(way)
        rows.append(f"| {name.rstrip('.')} | {len(found)} | {', '.join(found)} |")
    return "\n".join(rows)


def main() -> None:
    begin, end = "<!-- files of ways: begin -->\n", "<!-- files of ways: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    text, count = pattern.subn(lambda _: f"{begin}{table()}\n{end}", PAGE.read_text())
    if count != 1:
        sys.exit(f"{PAGE.name} has no place for the table")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
