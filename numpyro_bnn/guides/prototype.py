"""The first run of the model by a guide as one compiled program, where NumPyro runs
each operation by itself.
"""

from functools import partial
from typing import Any

import jax
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import constrain_fn, helpful_support_errors

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import is_latent
from numpyro_bnn._types import Kwargs, Sites
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
