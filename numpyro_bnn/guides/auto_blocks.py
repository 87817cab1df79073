"""AutoBlocks: a guide that splits the latent sites into blocks, each with its own
family of distributions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions.transforms import IdentityTransform, Transform
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.autoguide import AutoNormal

from numpyro_bnn._checks import argument_error, probabilities
from numpyro_bnn._distributions import elementwise
from numpyro_bnn._options import Model, Prefix, Switch, checked
from numpyro_bnn._types import Kwargs, PyTree, Site, Trees
from numpyro_bnn.guides import initialization
from numpyro_bnn.guides.blocks import Block, Family, Patterns, checked_blocks, partition
from numpyro_bnn.guides.initialization import init_to_fan_in
from numpyro_bnn.guides.prototype import (
    CompiledPrototype,
    Program,
    Scaled,
    prior_program,
    scaled_sites,
)
from numpyro_bnn.nn.base import Shape
from numpyro_bnn.program.compiled import run
from numpyro_bnn.program.plates import full_plates

NUM_DRAWS = 4096  # for medians and quantiles without closed form

Blocks: TypeAlias = Mapping[Any, Family] | Sequence[tuple[Patterns, Family]]
LocScale: TypeAlias = tuple[Array, Array]
Values: TypeAlias = dict[str, Array]


class AutoBlocks(AutoNormal, CompiledPrototype):
    r"""Approximate chosen blocks of sites jointly, each by its own family, and all
    other sites by mean field.

    .. math:: q(\theta) = \prod_b q_b(\theta_b) \prod_{j} N(\theta_j; \mu_j, \sigma_j^2)

    over the unconstrained latent sites. With ``condition_on_scales`` a site with prior
    N(m(h), s(h)^2), where s depends on other latent sites h, is w = m(h) + s(h) u, and
    the family is that of u: q(w | h) then follows its scale, as in a non-centered
    model.

    Sites outside the blocks have parameters ``<site>_<prefix>_loc`` and ``_scale``, as
    in :class:`~numpyro.infer.autoguide.AutoNormal`; a block has
    ``<prefix>_<patterns>_...``, and the block ``"*"`` of all sites has
    ``<prefix>_...``.

    :param model: a NumPyro model.
    :param blocks: families by pattern on site names (shell-style, or a tuple of
        patterns); a block of several sites is approximated jointly.
    :param init_scale: initial standard deviations: a number that multiplies the initial
        spread of each site (fan-in^-1/2 for kernels, at most the prior sd; 1 for others
        in unconstrained space), or the standard deviations themselves, numbers or
        arrays by pattern.
    :param init_loc_fn: strategy for the initial means, :func:`init_to_fan_in` by
        default.
    :param condition_on_scales: let weights follow the scales of their hierarchical
        priors. It helps if the data say little about single weights, and hurts if they
        say much, like non-centering: compare the bounds.
    :param prefix: prefix of the parameter names.
    :param create_plates: as in :class:`~numpyro.infer.autoguide.AutoGuide`, for
        minibatches.
    :raises ValueError: when first called, for patterns that match no site or overlap,
        and for a block with local latent sites (in a subsampled plate).

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
    >>> sorted(svi.get_params(state))
    ['auto_w_loc', 'auto_w_scale_tril', 'sigma_auto_loc', 'sigma_auto_scale']
    """

    @checked("guides.{}")
    def __init__(
        self,
        model: Model,
        blocks: Blocks = (),
        *,
        init_scale: PyTree = 0.1,
        init_loc_fn: Callable = init_to_fan_in,
        condition_on_scales: Switch = False,
        prefix: Prefix = "auto",
        create_plates: Callable | None = None,
    ) -> None:
        self._call = f"guides.{type(self).__name__}"
        initialization.check_init_scale(self._call, init_scale)
        self._asked = checked_blocks(self._call, blocks)
        self._condition_on_scales = condition_on_scales
        super().__init__(
            model,
            prefix=prefix,
            init_loc_fn=init_loc_fn,
            init_scale=init_scale,
            create_plates=create_plates,
        )

    # -- reading the model -------------------------------------------------------------

    def _choose_blocks(self) -> Sequence[tuple[str, tuple[str, ...], Family]]:
        """Label, patterns and family of each block; a subclass may override it to find
        its own blocks.
        """
        return [
            ("|".join(patterns), patterns, family) for patterns, family in self._asked
        ]

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._prototype_call = (args, kwargs)
        initialization.check_imputed(self._call, self.prototype_trace or {})
        latent = self._latent()
        self._scaled: Scaled = {}
        if self._condition_on_scales:
            local = {name for name in latent if self._subsampled_plates(name)}
            with handlers.block():
                self._scaled = scaled_sites(self._read(args, kwargs), local)
        start = run(
            self._initial, self._init_locs, (latent, *args), kwargs, runs_rarely=True
        )
        self._init_locs, self._init_scales = start
        self._make_blocks()

    def _subsampled_plates(self, name: str) -> list[str]:
        full_sizes = self._prototype_frame_full_sizes
        frames = self._latent()[name]["cond_indep_stack"]
        return [frame.name for frame in frames if frame.size != full_sizes[frame.name]]

    @property
    def _local_sites(self) -> set[str]:
        """Sites with one value per data point: in a plate of observations, or in a
        subsampled one.
        """
        data_plates: set[str] = set()
        for site in (self.prototype_trace or {}).values():
            if site.get("is_observed"):
                data_plates |= _plates(site)
        return {
            name
            for name, site in self._latent().items()
            if data_plates & _plates(site) or self._subsampled_plates(name)
        }

    def _initial(
        self, locs: Values, args: tuple, kwargs: Kwargs
    ) -> tuple[Values, Values]:
        """Initial means and standard deviations, by site; the arguments begin with the
        latent sites.
        """
        sites, call = args[0], (args[1:], kwargs)
        local, locs = self._local_sites, dict(locs)
        spreads = {}
        for name, site in sites.items():
            spreads[name] = initialization.initial_spread(site, name in local)
        # inside a `partial`
        strategy = getattr(self.init_loc_fn, "func", self.init_loc_fn)
        if bases := initialization.base_sites(self.prototype_trace or {}, ndim=2):
            with handlers.block(), full_plates():
                values = self._postprocess_fn(locs)
            for base, weight in bases.items():
                spreads[base] = initialization.base_spread(
                    base, locs[base], values[weight]
                )
                if strategy is init_to_fan_in:
                    locs[base] = locs[base] * spreads[base]
        shapes = {name: jnp.shape(value) for name, value in locs.items()}
        scales = initialization.initial_scales(
            self._call, self._init_scale, spreads, shapes
        )
        if self._scaled:
            values = {name: self._transforms[name](loc) for name, loc in locs.items()}
            for name, (loc, scale) in self._prior_program(call)(values).items():
                locs[name] = (locs[name] - loc) / scale
                scales[name] = scales[name] / jnp.abs(scale)
        return locs, scales

    def _make_blocks(self) -> None:
        specs = self._choose_blocks()
        sites_by_block = partition(
            self._call, list(self._latent()), [patterns for _, patterns, _ in specs]
        )
        self._blocks: list[tuple[Block, Family]] = []
        for (label, _, family), names in zip(specs, sites_by_block, strict=True):
            for name in names:
                if local := self._subsampled_plates(name):
                    got = f"site {name!r} inside the subsampled plate {local[0]!r}"
                    instead = (
                        "Leave it out of the blocks: local latent sites are "
                        "approximated by mean field."
                    )
                    raise argument_error(self._call, "blocks", got, instead)
            label = self.prefix if label == "*" else f"{self.prefix}_{label}"
            locs = {name: self._init_locs[name] for name in names}
            scales = {name: self._init_scales[name] for name in names}
            shapes = {name: jnp.shape(loc) for name, loc in locs.items()}
            block = Block(label, shapes, _joined(locs), _joined(scales))
            self._blocks.append((block, family))

    def _prior_program(
        self, call: tuple | None = None, indices: Trees | None = None
    ) -> Program:
        """Prior loc and scale of the conditioned sites; by default at the first call,
        with all plates full.
        """
        args, kwargs = call or self._prototype_call
        values = {name: site["value"] for name, site in self._latent().items()}
        return prior_program(self.model, self._scaled, values, args, kwargs, indices)

    # -- the guide ---------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """Sample the latent sites of the model; return their values by site."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        program: Program | None = None
        if self._scaled:
            # Where a handler fills the plates, a reading of minibatches has no place
            # for all indices.
            indices = None
            if any(len(plate._indices) != plate.size for plate in plates.values()):
                indices = {name: plate._indices for name, plate in plates.items()}
            program = self._prior_program((args, kwargs), indices)
        joint: Values = {}
        for block, family in self._blocks:
            fn = family.distribution(block)
            joint |= block.unflatten(
                numpyro.sample(f"{block.name}_latent", fn, infer={"is_auxiliary": True})
            )
        result: Values = {}
        for name, site in self._latent().items():
            moments = None
            if program and name in self._scaled:
                moments = program(result)[name]
            if name in joint:
                fn = self._in_block(name, site["fn"].event_dim, joint[name], moments)
                result[name] = numpyro.sample(name, fn)
                continue
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[name] = numpyro.sample(name, self._mean_field(name, moments))
        return result

    def _mean_field(self, name: str, moments: LocScale | None) -> dist.Distribution:
        event_dim, site = self._event_dims[name], f"{name}_{self.prefix}"
        loc = numpyro.param(f"{site}_loc", self._init_locs[name], event_dim=event_dim)
        scale = numpyro.param(
            f"{site}_scale",
            self._init_scales[name],
            constraint=self.scale_constraint,
            event_dim=event_dim,
        )
        if moments is not None:
            loc, scale = moments[0] + moments[1] * loc, jnp.abs(moments[1]) * scale
        fn = dist.Normal(loc, scale).to_event(event_dim)
        transform = self._transforms[name]
        if is_identity(transform):
            return fn
        return dist.TransformedDistribution(fn, transform)

    def _in_block(
        self,
        name: str,
        event_dim: int,
        unconstrained: Array,
        moments: LocScale | None,
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
        log_dets = (log_det, transform.log_abs_det_jacobian(unconstrained, value))
        batch_dim = jnp.ndim(value) - event_dim
        density = -sum(
            sum_rightmost(term, jnp.ndim(term) - batch_dim) for term in log_dets
        )
        return dist.Delta(value, log_density=density, event_dim=event_dim)

    # -- draws and summaries -----------------------------------------------------------

    def sample_posterior(
        self,
        rng_key: Array,
        params: Mapping,
        *args: Any,
        sample_shape: Shape = (),
        **kwargs: Any,
    ) -> Values:
        """Draw latent sites, and compute deterministic sites from them.

        :param rng_key: a key.
        :param params: parameters of the guide.
        :param sample_shape: leading shape of the draws.
        :return: values by site; those inside plates are of full size.
        """
        self._check_called("sample_posterior")
        return self._sites(self._draw(rng_key, params, sample_shape), sample_shape)

    def median(self, params: Trees) -> Values:
        """Medians of the latent sites in unconstrained space, mapped to their supports;
        deterministic sites at these.

        In closed form where marginals are Gaussian in unconstrained space, otherwise
        (flows, sites conditioned on their scales) from 4096 draws with a fixed key. Of
        a simplex, only :meth:`quantiles` has marginal medians.
        """
        self._check_called("median")
        middle = self._unconstrained_quantiles(params, jnp.array([0.5]))
        return self._constrain({name: value[0] for name, value in middle.items()}, ())

    def quantiles(
        self, params: Trees, quantiles: ArrayLike | Sequence[float]
    ) -> Values:
        """Marginal quantiles of the latent sites, computed like :meth:`median`; of a
        simplex from 4096 draws.

        For quantiles of deterministic sites, take quantiles of draws from
        ``sample_posterior``.

        :param quantiles: Q probabilities, or one.
        :return: arrays (Q, ...) by site.
        """
        self._check_called("quantiles")
        q = probabilities(f"{type(self).__name__}.quantiles", quantiles).reshape(-1)
        unconstrained = self._unconstrained_quantiles(
            params, jnp.concatenate([q, 1.0 - q])
        )
        draws: Values = {}
        sites: Values = {}
        for name, values in unconstrained.items():
            transform = self._transforms[name]
            if elementwise(transform).domain.event_dim == 0:
                sites[name] = _monotone(transform, values)
                continue
            if not draws:
                draws = self._sites(self._fixed_draws(params), (NUM_DRAWS,))
            sites[name] = jnp.quantile(draws[name], q, axis=0)
        return sites

    def _check_called(self, method: str) -> None:
        if self.prototype_trace is None:
            instead = (
                "Use it in `SVI` first, or call it once on the data, so that it reads "
                "the model."
            )
            raise argument_error(
                f"{self._call}.{method}", "params", "those of another guide", instead
            )

    def _normals(self, params: Trees) -> dict[str, dist.Normal]:
        joint = {name for block, _ in self._blocks for name in block.shapes}
        normals = {}
        for name in self._transforms:
            if name not in joint:
                site = f"{name}_{self.prefix}"
                normals[name] = dist.Normal(
                    params[f"{site}_loc"], params[f"{site}_scale"]
                )
        return normals

    def _families(self, params: Trees) -> list[dist.Distribution]:
        with handlers.block(), handlers.substitute(data=dict(params)):
            return [family.distribution(block) for block, family in self._blocks]

    def _draw(self, rng_key: Array, params: Trees, sample_shape: Shape) -> Values:
        """Unconstrained draws; for a conditioned site, draws of u."""
        values: Values = {}
        with handlers.block(), handlers.seed(rng_seed=rng_key):
            for (block, _), fn in zip(
                self._blocks, self._families(params), strict=True
            ):
                latent = numpyro.sample(
                    f"{block.name}_latent", fn, sample_shape=sample_shape
                )
                values |= block.unflatten(latent)
            for name, fn in self._normals(params).items():
                values[name] = numpyro.sample(name, fn, sample_shape=sample_shape)
        return values

    def _fixed_draws(self, params: Trees) -> Values:
        return self._draw(jax.random.key(0), params, (NUM_DRAWS,))

    def _sites(self, draws: Values, sample_shape: Shape) -> Values:
        return self._constrain(self._rescale(draws, sample_shape), sample_shape)

    def _rescale(self, draws: Values, sample_shape: Shape) -> Values:
        """Replace u by w = loc + scale u at conditioned sites."""
        if not self._scaled:
            return draws
        program = self._prior_program()

        def single(values: Values) -> Values:
            unconstrained: Values = {}
            constrained: Values = {}
            for name, transform in self._transforms.items():
                unconstrained[name] = values[name]
                if name in self._scaled:
                    loc, scale = program(constrained)[name]
                    unconstrained[name] = loc + scale * values[name]
                constrained[name] = transform(unconstrained[name])
            return unconstrained

        return _map_samples(single, draws, sample_shape)

    def _constrain(self, values: Values, sample_shape: Shape) -> Values:
        """Constrained values and deterministic sites, with full plates, from
        unconstrained values.
        """

        def single(draw: Values) -> Values:
            with handlers.block(), full_plates():
                return self._postprocess_fn(draw)

        if self._transforms_suffice:
            return {name: self._transforms[name](v) for name, v in values.items()}
        # A single draw is mapped as well: the compiled program leaves out the
        # likelihood of all the data.
        if sample_shape:
            return _map_samples(single, values, sample_shape)
        mapped = _map_samples(single, jax.tree.map(lambda v: v[None], values), (1,))
        return jax.tree.map(lambda v: v[0], mapped)

    def _unconstrained_quantiles(self, params: Trees, q: Array) -> Values:
        """(Q, ...) by site."""
        normals = self._normals(params)
        families = self._families(params)
        for (block, family), fn in zip(self._blocks, families, strict=True):
            if family.gaussian:
                sds = block.unflatten(jnp.sqrt(fn.variance))
                for name, mean in block.unflatten(fn.mean).items():
                    normals[name] = dist.Normal(mean, sds[name])
        closed_form = normals.keys() - self._scaled.keys()
        draws: Values = {}
        if closed_form < self._transforms.keys():
            draws = self._rescale(self._fixed_draws(params), (NUM_DRAWS,))
        quantiles = {}
        for name in self._transforms:
            if name in closed_form:
                fn = normals[name]
                quantiles[name] = fn.icdf(q.reshape((-1,) + (1,) * jnp.ndim(fn.loc)))
            else:
                quantiles[name] = jnp.quantile(draws[name], q, axis=0)
        return quantiles


def _plates(site: Site) -> set[str]:
    return {frame.name for frame in site["cond_indep_stack"]}


def _joined(values: Values) -> Array:
    return jnp.concatenate(list(map(jnp.ravel, values.values())))


def is_identity(transform: Transform) -> bool:
    """Whether a transform, in ``to_event`` or not, is the identity."""
    return isinstance(elementwise(transform), IdentityTransform)


def _monotone(transform: Transform, values: Array) -> Array:
    """Quantiles after a monotone transform, from those at q and 1 - q: a decreasing one
    reverses the order.
    """
    half = len(values) // 2
    direct, opposite = transform(values[:half]), transform(values[half:])
    zero = jnp.zeros(values.shape[1:])
    return jnp.where(transform(zero + 1.0) < transform(zero - 1.0), opposite, direct)


def _map_samples(fn: Callable, samples: Mapping[str, Any], sample_shape: Shape) -> dict:
    """Apply ``fn`` to every sample of a dictionary, one at a time."""
    if not sample_shape:
        return fn(samples)
    ndim = len(sample_shape)
    flat = jax.tree.map(
        lambda leaf: leaf.reshape((-1, *leaf.shape[ndim:])), dict(samples)
    )
    return jax.tree.map(
        lambda leaf: leaf.reshape(sample_shape + leaf.shape[1:]), jax.lax.map(fn, flat)
    )
