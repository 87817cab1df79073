"""AutoBlocks: a guide whose latent sites are cut into blocks, each with its own family of distributions."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost

from numpyro_bnn._checks import argument_error
from numpyro_bnn._dependence import pruned
from numpyro_bnn._plates import full_plates
from numpyro_bnn.guides.blocks import Block, Family, Patterns, checked_blocks, partition
from numpyro_bnn.guides.conditioning import Program, Scaled, prior_program, scaled_sites
from numpyro_bnn.guides.starting import (
    base_sites,
    check_init_scale,
    init_to_fan_in,
    starting_scales,
    starting_spread,
    unit_spread,
)
from numpyro_bnn.guides.summaries import BlockPosterior, is_identity

__all__ = ["AutoBlocks", "Block", "Family"]

Moments = tuple[jax.Array, jax.Array]
Blocks = Mapping[Any, Family] | Sequence[tuple[Patterns, Family]]


class AutoBlocks(BlockPosterior):
    r"""Approximate chosen blocks of sites jointly, each by its own family, and all other sites by mean field.

    .. math:: q(\theta) = \prod_b q_b(\theta_b) \prod_{j} N(\theta_j; \mu_j, \sigma_j^2)

    over the unconstrained latent sites. With ``condition_on_scales`` a site with prior N(m(h), s(h)^2), where s
    depends on other latent sites h, is w = m(h) + s(h) u, and the family is that of u: q(w | h) then follows its
    scale, as in a non-centered model.

    Sites of the rest have parameters ``<site>_<prefix>_loc`` and ``_scale``, like
    :class:`~numpyro.infer.autoguide.AutoNormal`; a block has ``<prefix>_<patterns>_...``, the block ``"*"`` of all
    sites ``<prefix>_...``.

    :param model: a NumPyro model.
    :param blocks: families by pattern (shell-style, or a tuple of patterns) on site names; a block of several sites
        is approximated jointly.
    :param init_scale: first standard deviations: a number that multiplies the starting spread of each site
        (fan-in^-1/2 for kernels, at most the prior sd; 1 for others in unconstrained space), or the standard
        deviations themselves, numbers or arrays by pattern.
    :param init_loc_fn: strategy for the first means, :func:`init_to_fan_in` by default.
    :param condition_on_scales: let weights follow the scales of their hierarchical priors. It gains where the data
        say little about single weights, and loses where they say much, as non-centring does: compare the bounds.
    :param prefix: of the parameters.
    :param create_plates: as in :class:`~numpyro.infer.autoguide.AutoGuide`, for minibatches.
    :raises ValueError: when first called, for patterns that match no site or overlap, and for a block with local
        latent sites (in a subsampled plate).

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)
    >>> guide = guides.AutoBlocks(model, {"w": guides.FullRank()})
    >>> svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    >>> state = svi.init(jax.random.key(0), jnp.ones((5, 3)), jnp.ones(5))
    >>> {name: value.shape for name, value in sorted(svi.get_params(state).items())}
    {'auto_w_loc': (3,), 'auto_w_scale_tril': (3, 3), 'sigma_auto_loc': (), 'sigma_auto_scale': ()}
    """

    def __init__(
        self,
        model: Callable,
        blocks: Blocks = (),
        *,
        init_scale: Any = 0.1,
        init_loc_fn: Callable = init_to_fan_in,
        condition_on_scales: bool = False,
        prefix: str = "auto",
        create_plates: Callable | None = None,
    ) -> None:
        self._call = f"guides.{type(self).__name__}"
        if not callable(model):
            raise argument_error(self._call, "model", model, "Pass a NumPyro model, a function.", TypeError)
        check_init_scale(self._call, init_scale)
        self._asked = checked_blocks(self._call, blocks)
        self._condition_on_scales = condition_on_scales
        super().__init__(
            model, prefix=prefix, init_loc_fn=init_loc_fn, init_scale=init_scale, create_plates=create_plates
        )

    # -- reading the model -----------------------------------------------------------------------------

    def _choose_blocks(self) -> Sequence[tuple[str, tuple[str, ...], Family]]:
        """Label, patterns and family of each block; what a subclass overrides to cut the sites by itself."""
        return [("|".join(patterns), patterns, family) for patterns, family in self._asked]

    def _latent(self) -> dict[str, dict[str, Any]]:
        """The latent sites of the model, in its order."""
        assert self.prototype_trace is not None
        trace = self.prototype_trace.items()
        return {n: s for n, s in trace if s["type"] == "sample" and not s["is_observed"]}

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._prototype_call = (args, kwargs)
        latent = self._latent()
        self._transforms = {name: biject_to(site["fn"].support) for name, site in latent.items()}
        self._find_scaled(args, kwargs)
        self._start()
        self._cut()

    def _local(self, name: str) -> list[str]:
        """The subsampled plates that a site is in."""
        frames = self._latent()[name]["cond_indep_stack"]
        return [f.name for f in frames if f.size != self._prototype_frame_full_sizes[f.name]]

    @property
    def _local_sites(self) -> set[str]:
        """Sites of which every data point has its own: in a plate of observations, or one that is subsampled."""
        trace = (self.prototype_trace or {}).values()
        data = {f.name for s in trace if s.get("is_observed") for f in s["cond_indep_stack"]}
        plates = {n: {f.name for f in s["cond_indep_stack"]} for n, s in self._latent().items()}
        return {name for name, inside in plates.items() if data & inside or self._local(name)}

    def _find_scaled(self, args: tuple, kwargs: Any) -> None:
        self._scaled: Scaled = {}
        if self._condition_on_scales:
            local = {name for name in self._latent() if self._local(name)}
            self._scaled = scaled_sites(self.model, self.prototype_trace or {}, local, args, kwargs)

    def _base_weights(self) -> dict[str, jax.Array]:
        """The weight of each non-centered site, at the first means."""
        bases = base_sites(self.prototype_trace or {})
        if not bases:
            return {}

        def weights(locs: Any) -> dict[str, jax.Array]:
            with handlers.block(), full_plates():
                sites = self._postprocess_fn(locs)
            return {base: sites[weight] for base, weight in bases.items()}

        return pruned(weights, self._init_locs)(self._init_locs)

    def _start(self) -> None:
        """First means and standard deviations, by site."""
        spreads = {n: starting_spread(site, n in self._local_sites) for n, site in self._latent().items()}
        for base, weight in self._base_weights().items():
            spread = spreads[base] = unit_spread(base, self._init_locs[base], weight)
            if _strategy(self.init_loc_fn) is init_to_fan_in:
                self._init_locs[base] = self._init_locs[base] * spread
        shapes = {name: jnp.shape(value) for name, value in self._init_locs.items()}
        self._init_scales = starting_scales(self._call, self._init_scale, spreads, shapes)
        if self._scaled:
            values = {n: self._transforms[n](loc) for n, loc in self._init_locs.items()}
            moments = self._full_program()(values)
            for name, (loc, scale) in moments.items():
                self._init_locs[name] = (self._init_locs[name] - loc) / scale
                self._init_scales[name] = self._init_scales[name] / jnp.abs(scale)

    def _cut(self) -> None:
        """Make the blocks."""
        chosen = self._choose_blocks()
        parts = partition(
            self._call, list(self._latent()), [(patterns, family) for _, patterns, family in chosen]
        )
        self._blocks: list[tuple[Block, Family]] = []
        for (label, _, family), names in zip(chosen, parts, strict=True):
            for name in names:
                if local := self._local(name):
                    raise argument_error(
                        self._call,
                        "blocks",
                        f"site {name!r} inside the subsampled plate {local[0]!r}",
                        "Leave it out of the blocks: local latent sites are approximated by mean field.",
                    )
            label = self.prefix if label == "*" else f"{self.prefix}_{label}"
            shapes = {name: jnp.shape(self._init_locs[name]) for name in names}
            loc, scale = (
                jnp.concatenate([jnp.ravel(values[name]) for name in names])
                for values in (self._init_locs, self._init_scales)
            )
            self._blocks.append((Block(label, shapes, loc, scale), family))

    def _full_program(self) -> Program:
        """Prior loc and scale of the conditioned sites, with all plates full, at the arguments of the first call."""
        args, kwargs = self._prototype_call
        return prior_program(self.model, self._scaled, self._examples(), args, kwargs)

    def _examples(self) -> dict[str, Any]:
        return {name: site["value"] for name, site in self._latent().items() if not self._local(name)}

    # -- the guide -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Sample the latent sites of the model.

        :return: values by site.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        program: Program | None = None
        if self._scaled:
            indices = {name: plate._indices for name, plate in plates.items()}
            program = prior_program(self.model, self._scaled, self._examples(), args, kwargs, indices)
        joint: dict[str, jax.Array] = {}
        for block, family in self._blocks:
            fn = family.distribution(block)
            joint |= block.unflatten(numpyro.sample(f"{block.name}_latent", fn, infer={"is_auxiliary": True}))
        result: dict[str, jax.Array] = {}
        for name, site in self._latent().items():
            moments = program(result)[name] if program is not None and name in self._scaled else None
            if name in joint:
                result[name] = numpyro.sample(
                    name, self._given(name, site["fn"].event_dim, joint[name], moments)
                )
                continue
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[name] = numpyro.sample(name, self._alone(name, moments))
        return result

    def _alone(self, name: str, moments: Moments | None) -> dist.Distribution:
        """Mean field of one site."""
        event_dim = self._event_dims[name]
        site, constraint = f"{name}_{self.prefix}", self.scale_constraint
        loc = numpyro.param(f"{site}_loc", self._init_locs[name], event_dim=event_dim)
        scale = numpyro.param(
            f"{site}_scale", self._init_scales[name], constraint=constraint, event_dim=event_dim
        )
        if moments is not None:
            loc, scale = moments[0] + moments[1] * loc, jnp.abs(moments[1]) * scale
        fn = dist.Normal(loc, scale).to_event(event_dim)
        transform = self._transforms[name]
        return fn if is_identity(transform) else dist.TransformedDistribution(fn, transform)

    def _given(
        self, name: str, event_dim: int, unconstrained: jax.Array, moments: Moments | None
    ) -> dist.Distribution:
        """The site as a function of the latent vector of its block."""
        log_det = jnp.zeros(jnp.shape(unconstrained))
        if moments is not None:
            unconstrained = moments[0] + moments[1] * unconstrained
            log_det = jnp.log(jnp.abs(moments[1]))
        transform = self._transforms[name]
        value = transform(unconstrained)
        if numpyro.get_mask() is False:
            return dist.Delta(value, event_dim=event_dim)
        parts = (log_det, transform.log_abs_det_jacobian(unconstrained, value))
        batch_dim = jnp.ndim(value) - event_dim
        density = -sum(sum_rightmost(part, jnp.ndim(part) - batch_dim) for part in parts)
        return dist.Delta(value, log_density=density, event_dim=event_dim)


def _strategy(init_loc_fn: Any) -> Any:
    """The function inside a strategy with settings."""
    return getattr(init_loc_fn, "func", init_loc_fn)
