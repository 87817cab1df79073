"""A run of a guide warns where simple models predict rows better: its figures against
refits without each row.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers import each
from scipy import stats
from scipy.special import expit, logsumexp

from numpyro_bnn import guides
from numpyro_bnn.metrics import HealthWarning
from numpyro_bnn.metrics.left_out import behind as behind_of

pytestmark = pytest.mark.usefixtures("x64")

N = 60
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3))
TARGETS = {
    "numbers": X @ [1.0, -1.0, 0.5] + 0.3 * RNG.normal(size=N),
    "classes": RNG.integers(2, size=N),
    "counts": RNG.poisson(1.0, size=N),
}
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def model(x, y=None, kind="numbers", sure=6.0, size=None, mask=None):
    """Far too sure for ``sure`` of 6: of a small noise, or a shift."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1))
    likelihoods = {
        "numbers": lambda f: dist.Normal(f, 0.6 / sure),
        "classes": lambda f: dist.Bernoulli(logits=0.5 * sure + f),
        "counts": lambda f: dist.Poisson(jnp.exp(0.5 * sure + f)),
    }
    with numpyro.plate("data", x.shape[0], subsample_size=size) as i:
        fn = likelihoods[kind](x[i] @ w)
        fn = fn if mask is None else fn.mask(mask[i])
        numpyro.sample("y", fn, obs=None if y is None else y[i])


def log_density(kind, y, f, sure):
    """log p(y | f), its slope, and its curvature, negative."""
    if kind == "numbers":
        noise = 0.6 / sure
        return stats.norm.logpdf(y, f, noise), (y - f) / noise**2, 0 * f + noise**-2
    f = 0.5 * sure + f
    if kind == "counts":
        rate = np.exp(f)
        return stats.poisson.logpmf(y, rate), y - rate, rate
    p = expit(f)
    return -np.logaddexp(0, np.where(y > 0, -1, 1) * f), y - p, p * (1 - p)


def of_refits(kind, sure):
    """Log scores of rows under Laplace approximations without them."""
    y, scores = TARGETS[kind], np.zeros(N)
    for n in range(N):
        others, w = np.arange(N) != n, np.zeros(3)
        for _ in range(40):
            _, slope, curvature = log_density(kind, y[others], X[others] @ w, sure)
            precision = X[others].T * curvature @ X[others] + np.eye(3)
            step = np.linalg.solve(precision, X[others].T @ slope - w)
            w = w + step / max(1.0, np.linalg.norm(step))
        sd = np.sqrt(X[n] @ np.linalg.solve(precision, X[n]))
        values = log_density(kind, y[n], X[n] @ w + sd * NODES, sure)[0]
        scores[n] = logsumexp(values, b=WEIGHTS)
    return scores


def of_simple_models(kind, y, x):
    """The larger mean log score of a constant and a line, fitted to the other rows."""
    means = []
    for columns in (x[:, :0], x):
        design, scores = np.c_[np.ones(len(y)), columns], np.zeros(len(y))
        rates = np.zeros(len(y))
        for n in range(len(y)):
            others = np.arange(len(y)) != n
            targets = np.log(y + 0.5) if kind == "counts" else y
            w = np.linalg.lstsq(design[others], targets[others], rcond=None)[0]
            fitted, freedom = design @ w, len(y) - 1 - design.shape[1]
            rates[n] = np.exp(fitted[n])
            if kind == "classes":
                shares = np.maximum([1 - fitted[n], fitted[n]], 0.05)
                scores[n] = np.log(shares[y[n]] / shares.sum())
            elif kind == "numbers":
                squares = np.sum((y - fitted)[others] ** 2) / freedom
                inverse = np.linalg.inv(design[others].T @ design[others])
                sd = np.sqrt(squares * (1 + design[n] @ inverse @ design[n]))
                scores[n] = stats.t.logpdf((y[n] - fitted[n]) / sd, freedom)
                scores[n] -= np.log(sd)
        if kind == "counts":
            rates *= (y.sum() - y) / (rates.sum() - rates)
            scores = stats.poisson.logpmf(y, rates)
        means.append(scores.mean())
    return max(means)


def nats(run):
    """How far behind a run says that it is."""
    with pytest.warns(HealthWarning, match="do not rely on this fit") as caught:
        result = run()
    (message,) = [str(w.message) for w in caught if "do not rely" in str(w.message)]
    return float(re.search(r"better by ([\d.e+]+) nats", message)[1]), result


def laplace(kind, structure="full", **options):
    return guides.AutoLaplace(model, structure).run(
        jax.random.key(0), X, TARGETS[kind], kind=kind, progress_bar=False, **options
    )


ROWS = [("numbers", "full"), ("numbers", "kron"), ("classes", "full")]
ROWS += [("counts", "full")]


@each(("kind", "structure"), ROWS, fast=3)
def test_laplace_knows_how_far_it_is_behind(kind, structure):
    """A step of Newton stands for a refit: exact for numbers."""
    behind, _ = nats(lambda: laplace(kind, structure))
    expected = of_simple_models(kind, TARGETS[kind], X) - of_refits(kind, 6.0).mean()
    assert expected > 0.2
    assert behind == pytest.approx(expected, rel=0.03 if kind == "numbers" else 0.15)
    laplace(kind, structure, sure=2.0 * (kind == "numbers"))  # nothing to warn of


def test_laplace_knows_it_of_minibatches_and_masked_rows():
    mask = jnp.arange(N) > 4
    hidden = np.where(mask, TARGETS["numbers"], 1e3)
    behind, _ = nats(lambda: laplace("numbers"))
    mode = {"w": np.linalg.lstsq(X, TARGETS["numbers"], rcond=None)[0]}
    at_mode = {"num_epochs": 0, "init_params": mode}
    of_batches, _ = nats(lambda: laplace("numbers", size=20, **at_mode))
    assert of_batches == pytest.approx(behind, rel=0.06)
    guide = guides.AutoLaplace(model, "full")
    options = {"mask": mask, "progress_bar": False}
    of_masked, _ = nats(lambda: guide.run(jax.random.key(0), X, hidden, **options))
    assert of_masked == pytest.approx(behind, rel=0.3)


@each("kind", ["numbers", "classes", "counts"], fast=2)
def test_adf_knows_how_far_its_rows_are_behind(kind):
    """In the second epoch each row is predicted without its share, and that is the
    loss; the first one has only the rows before. Two equal runs are as far behind.
    """
    key, y = jax.random.key(0), TARGETS[kind]
    sure = 3.0 if kind == "counts" else 6.0

    def run(key, y, num_epochs=2, sure=sure, **options):
        options |= {"kind": kind, "progress_bar": False, "sure": sure}
        guide = guides.AutoADF(model)
        return guide.run(key, X, y, num_epochs=num_epochs, max_refused=1.0, **options)

    behind, fit = nats(lambda: run(key, y))
    simple = of_simple_models(kind, y, X)
    assert behind == pytest.approx(simple + float(fit.losses[1]) / N, rel=0.06)
    run(key, y, num_epochs=1)
    keys = jnp.stack([key, key])
    both, _ = nats(lambda: run(keys, np.stack([y, y]), in_axes=(None, 0)))
    assert both == behind


def of_table(table):
    """The last column is observed."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", len(table)):
        numpyro.sample("y", dist.Normal(table[:, :3] @ w, 0.3), obs=table[:, 3])


def scaled_back(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(y.mean() + y.std() * (x @ w), 0.3), obs=y)


def with_weights(x, y, weights):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(y)), numpyro.handlers.scale(scale=weights):
        numpyro.sample("y", dist.Bernoulli(logits=b * x), obs=y)


RARE = np.arange(N) % 10 == 0


@pytest.mark.parametrize(
    ("guide", "data"),
    [
        (guides.AutoADF(of_table), [np.c_[X, TARGETS["numbers"]]]),
        (guides.AutoLaplace(of_table, "full"), [np.c_[X, TARGETS["numbers"]]]),
        (guides.AutoLaplace(scaled_back, "full"), [X, TARGETS["numbers"]]),
        (
            guides.AutoLaplace(with_weights, "full"),
            [np.ones(N), RARE.astype(int), np.where(RARE, 8.0, 1.0)],
        ),
    ],
)
def test_no_alarm(guide, data):
    """Of observations as inputs of a line, nor of weighted rows."""
    guide.run(jax.random.key(0), *data, num_epochs=50, progress_bar=False)


def test_what_counts_as_behind():
    """By an element of an observation; a class that is always seen is not certain."""
    y = np.repeat(TARGETS["numbers"][:, None], 20, axis=1)
    linear = 20 * stats.norm.logpdf(y[:, 0], X @ [1.0, -1.0, 0.5], 0.3)
    assert behind_of(linear - 20 * 0.05, [X], y, "numbers") is None
    assert behind_of(linear - 20 * 0.3, [X], y, "numbers").model == "a linear model"
    assert behind_of(np.full(N, -0.12), [X], np.ones((N, 1)), "classes") is None
    alone = np.c_[X, np.arange(N) == 7]  # a column of one row has a leverage of 1
    found = behind_of(linear / 20 - 1.0, [alone], y[:, :1], "numbers")
    assert found.model == "a linear model"


def test_an_interrupted_comparison_loses_no_fit(monkeypatch):
    def interrupted(*values):
        raise KeyboardInterrupt

    monkeypatch.setattr("numpyro_bnn.metrics.left_out.behind", interrupted)
    options = {"kind": "counts", "num_epochs": 2, "progress_bar": False}
    for guide in guides.AutoADF(model), guides.AutoLaplace(model, "full"):
        with pytest.warns(UserWarning, match="interrupted before") as caught:
            fit = guide.run(jax.random.key(0), X, TARGETS["counts"], sure=0, **options)
        assert fit.params
        assert len(caught) >= 1
