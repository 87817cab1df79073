"""NumPyro's AutoNormal, whose first run of the model is one compiled program instead of
hundreds.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import periodic_repeat
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import constrain_fn, helpful_support_errors, transform_fn

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import is_latent
from numpyro_bnn.program.plates import PARAMETERS
from numpyro_bnn.program.reading import initial_values


class CompiledAutoNormal(AutoNormal):
    """AutoNormal with the same initial values, found by one program; NumPyro runs each
    operation by itself.
    """

    def _latent(self) -> dict[str, dict[str, Any]]:
        trace = self.prototype_trace or {}
        return {name: site for name, site in trace.items() if is_latent(site)}

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        key = numpyro.prng_key()
        with handlers.block():
            z, trace = initial_values(
                key, self.model, self.init_loc_fn, args, kwargs, with_trace=True
            )
        self.prototype_trace = trace
        latent = self._latent()
        self._transforms = {}
        for name, site in latent.items():
            with helpful_support_errors(site):
                self._transforms[name] = biject_to(site["fn"].support)
        self._prototype_frame_full_sizes = {}
        params = {}
        for name, site in trace.items():
            if site["type"] == "plate":
                self._prototype_frame_full_sizes[name] = site["args"][0]
            elif site["type"] in PARAMETERS:
                params[name] = site["value"]
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
        self._init_locs = {}
        for name, site in latent.items():
            self._init_locs[name] = self._full_size(site, z[name])

        model = handlers.substitute(self.model, data=params)
        bounds = jax.tree.leaves([site["fn"].support for site in latent.values()])
        if all(isinstance(bound, int | float) for bound in bounds) and not any(
            site["type"] == "deterministic" for site in trace.values()
        ):
            postprocess: Any = partial(transform_fn, self._transforms)
        else:
            postprocess = partial(
                constrain_fn, model, args, kwargs, return_deterministic=True
            )
        self._postprocess_fn = handlers.seed(postprocess, rng_seed=0)

    def _full_size(self, site: dict[str, Any], loc: jax.Array) -> jax.Array:
        """Repeat the values of a site in a subsampled plate to the
        size of the plate.
        """
        event_dim = site["fn"].event_dim + jnp.ndim(loc) - jnp.ndim(site["value"])
        self._event_dims[site["name"]] = event_dim
        for frame in site["cond_indep_stack"]:
            size = self._prototype_frame_full_sizes[frame.name]
            if size != frame.size:
                loc = periodic_repeat(loc, size, frame.dim - event_dim)
        return loc
