"""Draws, medians and quantiles of a guide of blocks, from its parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import ndtri
from numpyro import handlers
from numpyro.distributions.transforms import IdentityTransform, IndependentTransform
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import transform_fn

from numpyro_bnn._checks import argument_error
from numpyro_bnn._plates import full_plates
from numpyro_bnn.guides.adf.approximation import map_samples
from numpyro_bnn.guides.blocks import Block, Family
from numpyro_bnn.guides.conditioning import Program, Scaled

__all__ = ["BlockPosterior", "is_identity"]

NUM_DRAWS = 4096  # of medians and quantiles without closed form
Values = dict[str, jax.Array]


class BlockPosterior(AutoNormal):
    """Blocks with families, the rest independent normals: what is computed from the parameters after fitting."""

    _call: str
    _blocks: list[tuple[Block, Family]]
    _scaled: Scaled
    _transforms: dict[str, Any]

    def _full_program(self) -> Program:
        raise NotImplementedError

    def sample_posterior(
        self,
        rng_key: jax.Array,
        params: Mapping[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Values:
        """Draw latent sites, and compute deterministic sites from them.

        :param rng_key: a key.
        :param params: of the guide.
        :param sample_shape: leading shape of the draws.
        :return: values by site; those inside plates are of full size.
        """
        self._check_called("sample_posterior")
        return self._sites(self._draw(rng_key, params, sample_shape), sample_shape)

    def median(self, params: Mapping[str, Any]) -> Values:
        """Medians of the latent sites, and deterministic sites there.

        In closed form where marginals are Gaussian in unconstrained space, otherwise (flows, sites conditioned on
        their scales) from 4096 draws with a fixed key.
        """
        self._check_called("median")
        middle = self._unconstrained_quantiles(params, jnp.array([0.5]))
        return self._replay({name: value[0] for name, value in middle.items()}, ())

    def quantiles(self, params: Mapping[str, Any], quantiles: Any) -> Values:
        """Quantiles of the latent sites, computed like :meth:`median`.

        Those of deterministic sites follow from draws: ``sample_posterior``.

        :param quantiles: Q probabilities, or one.
        :return: arrays (Q, ...) by site.
        """
        self._check_called("quantiles")
        q = jnp.asarray(quantiles, float).reshape(-1)
        found = self._unconstrained_quantiles(params, jnp.concatenate([q, 1.0 - q]))
        rotated = [name for name in found if not _is_elementwise(self._transforms[name])]
        sites = {n: _monotone(self._transforms[n], v) for n, v in found.items() if n not in rotated}
        if rotated:
            draws = self._sites(self._draw(jax.random.key(0), params, (NUM_DRAWS,)), (NUM_DRAWS,))
            sites |= {name: jnp.quantile(draws[name], q, axis=0) for name in rotated}
        return {name: sites[name] for name in found}

    # -- parts -----------------------------------------------------------------------------------------

    def _check_called(self, method: str) -> None:
        if self.prototype_trace is None:
            instead = "Use it in `SVI` first, or call it once on the data: it reads the model."
            raise argument_error(f"{self._call}.{method}", "params", "those of another guide", instead)

    def _normals(self, params: Mapping[str, Any]) -> dict[str, dist.Normal]:
        """The distributions of the sites in no block."""
        joint = {name for block, _ in self._blocks for name in block.shapes}

        def normal(name: str) -> dist.Normal:
            return dist.Normal(*(params[f"{name}_{self.prefix}_{field}"] for field in ("loc", "scale")))

        return {name: normal(name) for name in self._transforms if name not in joint}

    def _families(self, params: Mapping[str, Any]) -> list[dist.Distribution]:
        """The distributions of the blocks."""

        def build() -> list[dist.Distribution]:
            return [family.distribution(block) for block, family in self._blocks]

        with handlers.block():
            return handlers.substitute(build, data=dict(params))()

    def _draw(self, rng_key: jax.Array, params: Mapping[str, Any], sample_shape: tuple[int, ...]) -> Values:
        """Unconstrained draws; of a conditioned site those of u."""
        values: Values = {}
        with handlers.block(), handlers.seed(rng_seed=rng_key):
            for (block, _), fn in zip(self._blocks, self._families(params), strict=True):
                latent = numpyro.sample(f"{block.name}_latent", fn, sample_shape=sample_shape)
                values |= block.unflatten(latent)
            for name, fn in self._normals(params).items():
                values[name] = numpyro.sample(name, fn, sample_shape=sample_shape)
        return values

    def _sites(self, draws: Values, sample_shape: tuple[int, ...]) -> Values:
        return self._replay(self._unscaled(draws, sample_shape), sample_shape)

    def _unscaled(self, draws: Values, sample_shape: tuple[int, ...]) -> Values:
        """Put w = loc + scale u in the place of u at conditioned sites."""
        if not self._scaled:
            return draws
        program = self._full_program()

        def single(values: Values) -> Values:
            found: Values = {}
            known: Values = {}
            for name, transform in self._transforms.items():
                found[name] = values[name]
                if name in self._scaled:
                    loc, scale = program(known)[name]
                    found[name] = loc + scale * values[name]
                known[name] = transform(found[name])
            return found

        return map_samples(single, draws, sample_shape)

    def _replay(self, values: Values, sample_shape: tuple[int, ...]) -> Values:
        """Constrained values and deterministic sites, with full plates, of unconstrained values."""

        def single(one: Values) -> Values:
            with handlers.block(), full_plates():
                return self._postprocess_fn(one)

        if getattr(getattr(self._postprocess_fn, "fn", None), "func", None) is transform_fn:
            return self._postprocess_fn(values)  # nothing is computed by the model
        # Mapped even over a single one: what is compiled leaves out the likelihood, which may be of all the data.
        if sample_shape:
            return map_samples(single, values, sample_shape)
        mapped = map_samples(single, {name: value[None] for name, value in values.items()}, (1,))
        return {name: value[0] for name, value in mapped.items()}

    def _unconstrained_quantiles(self, params: Mapping[str, Any], q: jax.Array) -> Values:
        """(Q, ...) by site."""

        def closed_form(mean: jax.Array, sd: jax.Array) -> jax.Array:
            return mean + sd * ndtri(q).reshape((-1,) + (1,) * jnp.ndim(mean))

        found = {name: closed_form(fn.loc, fn.scale) for name, fn in self._normals(params).items()}
        for (block, family), fn in zip(self._blocks, self._families(params), strict=True):
            if family.gaussian:
                found |= block.unflatten(closed_form(fn.mean, jnp.sqrt(fn.variance)))
        found = {name: value for name, value in found.items() if name not in self._scaled}
        if missing := [name for name in self._transforms if name not in found]:
            draws = self._unscaled(self._draw(jax.random.key(0), params, (NUM_DRAWS,)), (NUM_DRAWS,))
            found |= {name: jnp.quantile(draws[name], q, axis=0) for name in missing}
        return {name: found[name] for name in self._transforms}


def _elementwise(transform: Any) -> Any:
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform


def is_identity(transform: Any) -> bool:
    """Whether a transform, in ``to_event`` or not, changes nothing.

    >>> from numpyro.distributions import biject_to, constraints
    >>> is_identity(biject_to(constraints.real_vector)), is_identity(biject_to(constraints.positive))
    (True, False)
    """
    return isinstance(_elementwise(transform), IdentityTransform)


def _is_elementwise(transform: Any) -> bool:
    base = _elementwise(transform)
    return base.domain.event_dim == 0 and base.codomain.event_dim == 0


def _monotone(transform: Any, values: jax.Array) -> jax.Array:
    """Quantiles behind a monotone transform, from those at q and at 1 - q: a falling one turns the order round."""
    half = len(values) // 2
    at, opposite = transform(values[:half]), transform(values[half:])
    zero = jnp.zeros(values.shape[1:])
    return jnp.where(transform(zero + 1.0) < transform(zero - 1.0), opposite, at)
