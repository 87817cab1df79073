"""The first run of the model by a guide as one compiled program, where NumPyro runs
each operation by itself; and sites whose prior sd is itself unknown: their loc and
scale at values of the hyper-sites.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import constrain_fn, helpful_support_errors

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import affine_normal, is_latent
from numpyro_bnn._types import Kwargs, Sites, Trees
from numpyro_bnn.program.plates import PARAMETERS, sites_of_type
from numpyro_bnn.program.posterior import Posterior


class CompiledPrototype(AutoGuide):
    """The first run of the model as one program, with the same initial values; beside
    :class:`~numpyro.infer.autoguide.AutoNormal`, which repeats those of subsampled
    plates.
    """

    def _latent(self) -> Sites:
        trace = self.prototype_trace or {}
        return {name: site for name, site in trace.items() if is_latent(site)}

    def _read(self, args: tuple, kwargs: Kwargs) -> Posterior:
        """What the model is, on a minibatch if there are any."""
        return Posterior(self.model, args, kwargs, full=False)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        key = numpyro.prng_key()
        with handlers.block():
            z, trace = self._read(args, kwargs).prototype(key, self.init_loc_fn)
        self.prototype_trace = trace
        latent = self._latent()
        self._init_locs = {name: z[name] for name in latent}
        self._transforms = {}
        for name, site in latent.items():
            with helpful_support_errors(site):
                self._transforms[name] = biject_to(site["fn"].support)
        for name, site in sites_of_type(trace, "plate").items():
            self._prototype_frame_full_sizes[name] = site["args"][0]
        frames: set[Any] = set()
        for site in latent.values():
            frames.update(site["cond_indep_stack"])
        self._prototype_frames = {frame.name: frame for frame in frames}
        if len(frames) > len(self._prototype_frames):
            names = sorted(frame.name for frame in frames)
            got = (
                f"plates of one name with several sizes or dims (plates of latent "
                f"sites: {', '.join(names)})"
            )
            raise argument_error(
                f"guides.{type(self).__name__}",
                "model",
                got,
                "Give each plate a name of its own.",
            )
        parameters = sites_of_type(trace, *PARAMETERS)
        model = handlers.substitute(
            self.model, data={name: site["value"] for name, site in parameters.items()}
        )
        postprocess = partial(
            constrain_fn, model, args, kwargs, return_deterministic=True
        )
        self._postprocess_fn = handlers.seed(postprocess, rng_seed=0)
        bounds = jax.tree.leaves([site["fn"].support for site in latent.values()])
        #: Whether constrained values follow from the transforms alone.
        self._transforms_suffice = not sites_of_type(trace, "deterministic") and all(
            isinstance(bound, int | float) for bound in bounds
        )


# Parents of each site whose prior N(loc, scale^2) has a scale that depends on other
# latent sites.
Scaled: TypeAlias = Mapping[str, frozenset[str]]
# Maps values of sites to prior loc and scale by site.
Program: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, tuple[Array, Array]]]


def _moments(
    sites: Mapping[str, dict], names: Iterable[str]
) -> dict[str, tuple[Array, Array]]:
    """Prior loc and scale of those sites that are normal."""
    moments = {}
    for name in names:
        pair = affine_normal(sites[name]["fn"], masked=True)
        if pair is not None:
            moments[name] = pair
    return moments


def scaled_sites(reading: Posterior, local: set[str]) -> Scaled:
    """Find the Gaussian sites whose prior sd depends on other latent sites, and those
    sites.

    :param local: sites inside subsampled plates; sites that depend on one of them are
        left out.
    """
    scaled = {}
    for name, parents in reading.scaled.items():
        if not parents & local:
            scaled[name] = parents
    return scaled


def prior_program(
    model: Callable,
    scaled: Scaled,
    examples: Trees,
    args: tuple,
    kwargs: Kwargs,
    plates: Trees | None = None,
) -> Program:
    """A function from values of hyper-sites to prior loc and scale of the sites they
    scale, without the likelihood.

    :param examples: values of latent sites, used if a value is not known yet.
    :param plates: indices of plates; without them every plate is full.
    """
    with handlers.block():
        reading = Posterior(model, args, kwargs, full=plates is None)
    parents = sorted(set().union(*scaled.values()))

    def program(values: Trees) -> Mapping[str, tuple[Array, Array]]:
        inputs = dict(plates or {})
        for name in parents:
            inputs[name] = jnp.asarray(values.get(name, examples[name]), float)
        return _moments(reading.at(inputs, only=scaled), scaled)

    return program
