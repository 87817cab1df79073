"""Faults chosen by people, and faults that change nothing a user could see.

Two lines a fault: function, transformation, and number among the places of that
transformation in the function; then what goes wrong, or why nothing does. A name that
no longer exists fails `tests/use/test_repository.py`.
"""

Key = tuple[str, str, int]


def listed(text: str) -> dict[Key, str]:
    """Function, transformation and number of each fault, and the line below."""
    lines = text.strip().splitlines()
    faults: dict[Key, str] = {}
    for name, why in zip(lines[::2], lines[1::2], strict=True):
        function, kind_and_number = name.split(", ")
        kind, number = kind_and_number.rsplit(" ", 1)
        faults[function, kind, int(number)] = why.strip()
    return faults


# Where a wrong sign or factor gives wrong numbers without a word: at most 60.
IMPORTANT = listed("""
estimators.classifier.Classifier.uncertainty, dropped term 0
    epistemic entropy is the total
estimators.network.Network._conformal_rank, off by one 0
    conformal ranks forget the new row
estimators.network.copied_rows, dropped term 0
    zeros of the other sign are no copies
estimators.mixtures._log_density, lost factor 0
    a Student's t takes its sd for its scale
estimators.regressor.Regressor.predict, dropped term 0
    the variance of the function is left out
guides.adf.moment_matching.Gamma.variance, off by one 0
    1 / E precision instead of E of 1 / precision
guides.adf.moment_matching._log_density, dropped term 0
    a log scale forgets the Jacobian
guides.auto_blocks.AutoBlocks._in_block, sign 2
    the density of a site in a block adds the Jacobian
guides.auto_blocks.AutoBlocks._initial, dropped term 0
    conditioned sites start at the prior mean twice
guides.blocks.LowRank.distribution, lost factor 3
    the diagonal of a low-rank covariance is the sd
guides.blocks.LowRank.distribution, lost factor 2
    low-rank factors do not follow the scale
guides.elbo.elbo.read_terms, sign 0
    factors of the guide have the wrong sign
guides.fitting._Run._failure, off by one 0
    the failed step is named one too early
guides.flowjax.FlowjaxDistribution.log_prob, sign 0
    the density of a flow has the wrong sign of its scale
guides.flowjax.FlowjaxDistribution.sample_with_intermediates, dropped term 1
    draws forget the scale
guides.laplace.tuning.EvidenceTuning._evidence, sign 0
    the evidence has the wrong sign of the volume
guides.laplace.tuning.EvidenceTuning._evidence, lost factor 1
    the evidence lacks the constant of the unknowns
infer.phases.SGMCMCState.spend, dropped term 0
    gradients are not counted
infer.collapse.log_marginal, dropped term 0
    the normalization of a prior's power is forgotten
infer.collapse.sample, dropped term 3
    draws are corrected without the noise of the data
infer.linear_blocks._joined, sign 0
    a sum counts as a difference
infer.collapse._slope, dropped term 0
    the slope of the evidence forgets the log determinant
infer.collapse._slope, sign 1
    the slope of the evidence in the data has the wrong sign
infer.energy.AdaptEnergy._adapted, inverted ratio 3
    the step size is adapted in the wrong direction
infer.mclmc.MCLMC.stable_step_size, lost factor 0
    the first step is that of one parameter
program.posterior.Posterior.row_axes, dropped term 0
    the axis of a plate ignores the event
infer.momentum.SGNHT.dynamics, lost factor 0
    the mass of the thermostat does not scale with the step
infer.orbit.OrbitMoves._move, key used twice 0
    moves of all symmetries share a key
infer.precision_gibbs._conditional, sign 3
    a variance's children are counted as a precision's
infer.target._rows, dropped term 0
    plates of latent sites count as plates of data
infer.energy.autocorrelation_time, off by one 0
    the first autocorrelation counts twice
infer.step_size.largest_curvature, dropped term 1
    the mean of half of the quotients divides by all of them
infer.unit_moves.UnitMoves._move, comparison 0
    moves begin with the warm-up and end after it
infer.warm_start.optimize.descend, sign 1
    the optimizer climbs the potential
infer.warm_start.optimize.descend, dropped term 0
    every optimizer step sees the same minibatch
infer.wrapper.Wrapper._transitions, input returned 0
    the inner kernel keeps energies from before the moves
infinite.activations._piecewise_linear.slopes, sign 0
    rectifiers have the wrong sign of the arcsine
infinite.prior_moments._moments, lost factor 0
    variances of a prior are not multiplied by the fan-in
infinite.regression.GPRegression.log_density, dropped term 0
    the density of a process forgets the noise
infinite.regression.factorize.attempt, off by one 0
    the first jitter is ten times too large
infinite.rules._first_dense, dropped term 2
    variances of the second inputs without biases
infinite.rules._shifted, dropped term 1
    gains of LayerNorm are not in the tangent kernel
moments.closed_forms._rectified, dropped term 1
    the rectifier's variance forgets the squared mean
moments.rules._mul_independent, dropped term 1
    a product of two forgets the product of variances
moments.expectation.moments_of, lost factor 2
    an affine function scales its variance once
moments.rules._product, dropped term 1
    a product of random arrays forgets the product of variances
nn.norm.standardize, lost factor 3
    recorded sds are in units of the normalization
priors.base.Prior.fan_in_factor, factor 0
    scales divided by the fan-in in the place of its root
program.rows.Rows.digest, dropped term 1
    other rows have the same hash
results.fit.sample_stats, off by one 0
    one tree depth too small
runs.blocks.Chains._compiled.advance.transition, off by one 0
    thinning keeps the first of each window
sgmcmc.dynamics.turn, off by one 0
    the microcanonical turn counts P degrees of freedom
sgmcmc.metropolis.HMC.step, dropped term 2
    a trajectory forgets the kinetic energy
sgmcmc.schedules.polynomial.__call__, sign 1
    the power of the polynomial schedule is positive
symmetry.canonical._absolute, sign 0
    the first reference has its smallest unit first
symmetry.draws.in_gauge, sign 0
    shifts bring the mean to twice itself
symmetry.finding._with_scales, sign 0
    outgoing scales move the same way as incoming ones
symmetry.gig.log_gig, lost factor 1
    B = h - p without the square root of ab
symmetry.moves._normal_shift, sign 4
    a shift is centered at the elements, not opposite to them
""")

# Faults that lived, and why no user could see them.
HARMLESS = listed("""
symmetry.gig._envelope, off by one 0
    tangents at other points, which only change the number of rejections
symmetry.gig._envelope, off by one 1
    tangents at other points, which only change the number of rejections
priors.base._NonCenter.process_message, sign 0
    a handler that is no scope is ignored, and an outer scope has not named the site yet
priors.base._NonCenter.process_message, off by one 0
    a handler that is no scope is ignored, and an outer scope has not named the site yet
priors.base._NonCenter.process_message, dropped term 0
    a handler that is no scope is ignored, and an outer scope has not named the site yet
guides.adf.moment_matching.refine_normal.log_posterior, factor 0
    stands in for the precision of weights that the next condition leaves out
infer.preconditioning.LearnPreconditioner._collected, factor 0
    a bound that only a first gradient reaches, whose weight is 1 if nothing is kept
infer.preconditioning.LearnPreconditioner._collected, factor 1
    of a first gradient, which the second replaces, or which fades after a restart
infer.preconditioning.LearnPreconditioner._collected, sign 0
    other minibatches, each still used once; some are those of steps of the warm-up
infer.preconditioning.LearnPreconditioner._collected, sign 1
    other minibatches, each still used once; some are those of steps of the warm-up
infer.unit_moves.UnitMoves._move.step, key used twice 0
    one is split further, the other drawn from: these bits are unrelated
results.fit._check_unchanged, factor 0
    a limit between rounding and changed data; half or twice as much serves too
results.fit._check_unchanged, lost factor 0
    on a CPU the potential has the same bits; other devices round it
results.prediction._values, input returned 0
    an empty mapping, or one of groups, which no site or argument is called like
program.axes.counted, sign 0
    NumPyro gives every site the rank of its plates
program.rows.Rows.extremes, lost factor 0
    at most 256 MiB instead of 32 are read at once; the answer is the same
""")
