"""Calls that read a model with data: what no model can use is refused by each.

One kernel and one guide are as good as all: they read models by the same code.
"""

import jax
import optax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from numpyro_bnn import guides, infer, symmetry


def start(model, *data):
    return infer.SGLD(model).init(jax.random.key(0), 4, None, data, {})


def set_up(model, *data):
    handlers.seed(guides.AutoMeanField(model), 0)(*data)


def fit(model, *data):
    svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    return guides.fit(svi, jax.random.key(0), 2, *data, progress_bar=False)


def adf(model, *data):
    return guides.AutoADF(model).run(jax.random.key(0), *data)


def laplace(model, *data):
    return guides.AutoLaplace(model).run(jax.random.key(0), *data)


def collapse(model, *data):
    return infer.collapse(model, ["w"], *data)


def check(model, *data):
    symmetry.check(model, [symmetry.Scale("w")], data)


READERS = {
    "SGLD": start,
    "AutoMeanField": set_up,
    "AutoADF": adf,
    "AutoLaplace": laplace,
    "fit": fit,
    "find": symmetry.find,
    "collapse": collapse,
    "check": check,
}
