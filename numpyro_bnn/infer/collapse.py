"""A model with its linear sites integrated out, for samplers that move what is left."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import lax
from numpyro.infer.gibbs import latent_sample_sites
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import affine_normal
from numpyro_bnn._keys import key_from
from numpyro_bnn._plates import full_trace, isolated
from numpyro_bnn.infer.linear import Linear, Structure, log_marginal, sample
from numpyro_bnn.infer.linearity import check_names, read

__all__ = ["collapse"]

CALL = "infer.collapse"
FACTOR = "_collapsed_log_likelihood"


def collapse(model: Callable, sites: Sequence[str], *args: Any, **kwargs: Any) -> Callable:
    r"""The same model with sites that enter linearly integrated out, exactly.

    For data and weights :math:`y \sim N(f + A w, S)`, :math:`w \sim N(m, D)`, where f, A, m, S and D depend on all
    other sites, a sampler needs only the latter,

    .. math:: p(\theta \mid y) \propto p(\theta)\, N(y;\ f + A m,\ A D A^\top + S),

    and w is drawn from its normal conditional for each draw afterwards. The output layer of a network given the
    layers below is such a site: without it there is no ridge left between the scales of two layers, hidden units
    that are not needed are free to move, and modes that differ in their output weights become one.

    The sites come back as deterministic ones, so draws, ``Predictive(model, ...)`` and
    :func:`~numpyro_bnn.to_inference_data` show them as if they had been sampled. The random numbers of these draws
    come from the bits of the draw itself: the model stays a function of its latent sites.

    A gradient costs min(N, P) directional derivatives or gradients of the model more than before, and a QR
    decomposition of a matrix of N + P times min(N, P) elements.

    :param model: a NumPyro model.
    :param sites: names of sites with independent normal priors that means of normal data are linear in.
    :param args: positional arguments of the model, with the data.
    :param kwargs: its keyword arguments.
    :return: a model with the signature of ``model``; it returns nothing.
    :raises ValueError: where the model is not linear in the sites, noise or prior are not normal, or what depends on
        them is not observed.
    :raises TypeError: for names that are no sequence of strings.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_bnn import models, nn
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(nn.MLP([3, 1], "tanh"))
    >>> hidden = collapse(model, ["net/Dense_1.kernel", "net/Dense_1.bias"], x, x[:, 0])
    >>> mcmc = MCMC(NUTS(hidden), num_warmup=5, num_samples=5, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_samples()["net/Dense_1.kernel"].shape
    (5, 3, 1)
    """
    names = check_names(CALL, "sites", sites, least=1)
    with jax.ensure_compile_time_eval(), isolated():
        traced = full_trace(model, {}, args, kwargs)
        held = {name for name in latent_sample_sites(traced) if name not in names}
        structure = read(CALL, model, names, (), held, args, kwargs)
    for name in structure.data:
        if not traced[name]["is_observed"]:
            raise argument_error(
                CALL,
                "sites",
                f"{names}, on which the latent site {name!r} depends",
                f"Only data may depend on them: name {name!r} as well, or use `infer.GaussianGibbs`.",
            )

    @wraps(model)
    def collapsed(*args: Any, **kwargs: Any) -> None:
        run = _WithoutLinear(structure)
        with run:
            model(*args, **kwargs)
        if run.values.keys() >= held:  # not while an outer handler hides sites
            _integrate(model, structure, run.values, args, kwargs)

    collapsed.predictive_model = model  # type: ignore[attr-defined]
    return collapsed


class _WithoutLinear(Messenger):
    """Run a model with its linear sites at their prior means, unseen like the data; note all other latent values."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.values: dict[str, jax.Array] = {}
        super().__init__(None)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "deterministic":
            msg["stop"] = True  # recorded once the linear sites are drawn
        elif msg["type"] == "sample" and msg["name"] in self.structure.shapes:
            msg["value"], _ = affine_normal(msg["fn"]) or (None, None)
            msg["stop"] = True
        elif msg["type"] == "sample" and msg["name"] in self.structure.data:
            msg["stop"] = True

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        seen = msg["type"] == "sample" and not msg["is_observed"]
        if seen and msg["name"] not in self.structure.shapes:
            self.values[msg["name"]] = msg["value"]


def _integrate(
    model: Callable, structure: Structure, values: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
) -> None:
    """The factor that takes the place of the data, and the sites that were left out."""
    with isolated():
        linear = Linear(model, structure, values, args, kwargs)
        parts, jacobian = linear.parts({}), linear.jacobian({})
        factor = log_marginal(parts, jacobian)
        at = {name: lax.stop_gradient(jnp.asarray(value)) for name, value in values.items()}
        still = lax.stop_gradient((parts, jacobian))
        traced = linear.trace({}, sample(key_from(at), *still))
    numpyro.factor(FACTOR, factor)
    for name, site in traced.items():
        if name in structure.shapes or site["type"] == "deterministic":
            numpyro.deterministic(name, site["value"])
