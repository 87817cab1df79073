"""What tests of several shelves use: short runs, groups of results in both versions of
ArviZ, refusals.
"""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_bnn import infer
from numpyro_bnn.sgmcmc.engine import reset_statistics


def each(names, rows, *, fast=None, slow=()):
    """``parametrize`` by rows, all of which run in `make test-all`.

    :param names: one name, or a tuple of names if rows are tuples.
    :param fast: the rows that run in `make test`, or how many of the first.
    :param slow: instead, those that do not.
    """
    rows = list(rows)
    fast = rows[:fast] if isinstance(fast, int) else fast
    params = []
    for row in rows:
        is_slow = row in slow if fast is None else row not in fast
        values = row if isinstance(names, tuple) else (row,)
        params.append(pytest.param(*values, marks=pytest.mark.slow if is_slow else ()))
    return pytest.mark.parametrize(names, params)


def run_chains(
    kernel,
    *args,
    num_warmup=4,
    num_samples=6,
    num_chains=2,
    seed=0,
    run_options=None,
    **kwargs,
):
    """A finished ``MCMC`` of vectorized chains; keywords go to the model.

    :param run_options: options of ``MCMC.run`` itself, such as ``extra_fields``; others
        of ``MCMC`` belong in a test.
    """
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *args, **(run_options or {}), **kwargs)
    return mcmc


# The Metropolis-adjusted Langevin algorithm: trajectories of one step.
mala = partial(infer.GHMC, num_steps=1, jitter=0.0, steps_per_draw=10)


def walk(
    kernel,
    num,
    args=(),
    kwargs=None,
    *,
    start=None,
    warmup=0,
    chains=None,
    key=None,
    edit=None,
    keep=None,
):
    """Transitions of a kernel without ``MCMC``, compiled as one program: the last
    state, and what ``keep`` takes.

    :param chains: number of vectorized chains; ``None`` for a single one.
    :param key: by default that of seed 0.
    :param edit: function of the first state, such as one that moves it.
    :param keep: function of a state, by default its ``z``; the results have a leading
        axis of ``num`` transitions.
    """
    key = jax.random.key(0) if key is None else key
    state = kernel.init(
        key if chains is None else jax.random.split(key, chains),
        warmup,
        start,
        args,
        kwargs or {},
    )
    state = edit(state) if edit else state

    def transition(state, _):
        state = kernel.sample(state, args, kwargs or {})
        return state, keep(state) if keep else state.z

    return jax.device_get(
        jax.jit(lambda first: lax.scan(transition, first, None, num))(state)
    )


def squares_of(sampler, start, burn, keep, thin=1, num_warmup=0):
    """Means of x^2 over draws of a pure sampler, by coordinate, and its last state."""

    @jax.jit
    def run(state):
        def body(carry, _):
            state, total = carry
            state = sampler.run(state, thin)
            return (state, total + state.position**2), None

        state = reset_statistics(sampler.run(state, burn))
        return lax.scan(body, (state, jnp.zeros(start.shape)), None, keep)[0]

    state, total = run(sampler.init(start, jax.random.key(1), num_warmup))
    assert int(state.first_divergence) == -1
    return np.asarray(total, np.float64) / keep, state


def traced_sites(model, *args, **kwargs):
    """The sites of a model as its program is traced: shapes and dtypes only."""
    sites = {}
    jax.eval_shape(
        lambda: sites.update(
            handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)
        )
    )
    return sites


def group(idata, name):
    """A group of results as an xarray dataset, of both versions of ArviZ."""
    found = idata[name]
    return (
        found.to_dataset()
        if hasattr(found, "to_dataset") and hasattr(found, "children")
        else found
    )


def group_names(idata):
    """Names of the groups of results, in both versions of ArviZ."""
    groups = idata.groups() if callable(idata.groups) else idata.groups
    return {name.strip("/") for name in groups} - {""}


@contextmanager
def refused(argument, fragment="", kind=(ValueError, TypeError)):
    """An error that teaches: it names the call and the argument, says what came, and
    what to write instead.
    """
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    assert f"argument `{argument}` got " in message, message
    assert fragment in message, message
    assert "Traced<" not in message, message
    assert len(message.split("\n")[0]) < 600, message


def within_errors(draws, exact, standard_errors=5.0):
    """Whether the mean of independent draws (axis 0) is within so many standard errors
    of the exact mean.

    Five standard errors: one of a million right means is beyond.
    """
    draws = np.asarray(draws, float)
    error = draws.std(0, ddof=1) / len(draws) ** 0.5
    return bool(np.all(np.abs(draws.mean(0) - exact) < standard_errors * error))


def results(groups, attrs=None, coords=None):
    """Results as `to_inference_data` gives them, for the installed ArviZ.

    :param groups: name -> variable -> (dims, values), or an xarray dataset.
    """
    import arviz as az
    import xarray as xr

    draws = {"chain", "draw"}
    datasets = {}
    for name, variables in groups.items():
        data = (
            variables
            if isinstance(variables, xr.Dataset)
            else xr.Dataset(dict(variables))
        )
        labels = {
            dim: np.arange(size)
            for dim, size in data.sizes.items()
            if dim in draws and dim not in data.coords
        }
        labels |= {
            dim: values for dim, values in (coords or {}).items() if dim in data.dims
        }
        datasets[name] = data.assign_coords(labels)
    if int(az.__version__.split(".")[0]) < 1:
        return az.InferenceData(**datasets, attrs=dict(attrs or {}))
    tree = xr.DataTree.from_dict({f"/{name}": data for name, data in datasets.items()})
    tree.attrs = dict(attrs or {})
    return tree


def with_groups(idata, **groups):
    """The same results with groups replaced, or (None) left out."""
    kept = {name: group(idata, name) for name in group_names(idata)} | groups
    return results(
        {name: data for name, data in kept.items() if data is not None}, idata.attrs
    )
