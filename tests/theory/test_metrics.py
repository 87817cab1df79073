"""Scores against closed forms and independent references; each statistical tolerance
states its failure rate.
"""

import arviz as az
import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics
from numpy.testing import assert_allclose as close
from numpy.testing import assert_array_equal as equal

from numpyro_bnn import metrics

# A normal value leaves +-4.5 standard errors with probability 7e-6; with one such check
# per test and fixed seeds the suite fails by chance, for a new set of seeds, less than
# once in 5000.
SIGMAS = 4.5
RATE = 1e-5  # of a Kolmogorov-Smirnov test


@pytest.fixture
def rng():
    return np.random.default_rng(20)


def within(values, expected):
    """The mean of independent values is ``expected`` up to SIGMAS of its error."""
    values = np.asarray(values)
    error = values.std(ddof=1) / np.sqrt(values.size)
    assert abs(values.mean() - expected) < SIGMAS * error, (
        values.mean(),
        expected,
        error,
    )


# --- regression


def test_rmse_and_its_standard_error(rng):
    errors = rng.normal(scale=2.0, size=(400, 200))
    scores = [metrics.rmse(row, np.zeros(200)) for row in errors]
    close(
        scores[0].value,
        np.sqrt(sklearn.metrics.mean_squared_error(errors[0], np.zeros(200))),
    )
    equal(scores[0].pointwise, np.abs(errors[0]))
    # The spread of 400 values has a relative error of 1 / sqrt(800) = 3.5 %: 16 % is
    # 4.5 of those.
    spread = np.std([score.value for score in scores], ddof=1)
    close(np.mean([score.standard_error for score in scores]), spread, rtol=0.16)
    assert metrics.rmse([1.0, 2.0], [1.0, 2.0])[:2] == (0.0, 0.0)


def test_lppd_of_float32_draws_by_chain_is_the_log_of_the_mixture_in_float64(rng):
    log_lik = rng.normal(-50, 20, size=(4, 250, 5)).astype(np.float32)
    score = metrics.lppd(log_lik)
    direct = scipy.special.logsumexp(
        log_lik.reshape(-1, 5).astype(np.float64), axis=0
    ) - np.log(1000)
    close(score.pointwise, direct, rtol=1e-13)
    close(score.value, direct.mean(), rtol=1e-13)
    close(score.standard_error, scipy.stats.sem(direct), rtol=1e-12)
    assert np.isnan(metrics.lppd(log_lik[..., :1]).standard_error)


def test_lppd_is_stable_far_from_zero():
    log_lik = np.array([[-1e5, -np.inf, -np.inf, 1e4], [-1e5 - 1, -3.0, -np.inf, 1e4]])
    score = metrics.lppd(log_lik)
    expected = scipy.special.logsumexp(log_lik[:, [0, 1, 3]], axis=0) - np.log(2)
    close(score.pointwise[[0, 1, 3]], expected, rtol=1e-14)
    assert score.pointwise[2] == score.value == -np.inf
    assert np.isnan(score.standard_error)


def test_crps_equals_its_definition(rng):
    draws, y = rng.normal(size=(3, 9, 5)) + 1e3, rng.normal(size=5) + 1e3
    flat = draws.reshape(27, 5)
    pairs = np.abs(flat[:, None] - flat[None]).sum(axis=(0, 1)) / (2 * 27 * 26)
    expected = np.abs(flat - y).mean(axis=0) - pairs
    close(metrics.crps(draws, y).pointwise, expected, rtol=1e-9)
    shifted = metrics.crps(draws + 1e6, y + 1e6).pointwise
    close(shifted, expected, rtol=1e-6)


@pytest.mark.parametrize("size", [2, 20])
def test_crps_is_unbiased_for_any_number_of_draws(rng, size):
    """40,000 estimates; Gneiting and Raftery (2007), section 4.2."""
    y, mean, scale = 0.7, 1.0, 2.0
    fair = metrics.crps(
        rng.normal(mean, scale, size=(size, 40_000)), np.full(40_000, y)
    ).pointwise
    z, normal = (y - mean) / scale, scipy.stats.norm
    within(
        fair,
        scale * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z) - 1 / np.sqrt(np.pi)),
    )
    # The usual estimator, with S^2 pairs, is off by E|X - X'| / (2 S): the check above
    # can see that.
    bias = scale * 2 / np.sqrt(np.pi) / (2 * size)
    assert bias > 2 * SIGMAS * fair.std() / np.sqrt(40_000)


@pytest.mark.parametrize("size", [19, 400])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_of_calibrated_draws_is_the_level_for_few_draws_too(rng, size, level):
    # 20 000 independent points whose targets are exchangeable with their draws. (S +
    # 1)(1 - level) / 2 is whole for the first size, where coverage is exact; for the
    # second interpolation errs by less than 1e-4.
    points = 20_000
    values = rng.normal(size=(size + 1, points))
    result = metrics.interval_coverage(values[1:], values[0], level)
    assert result.standard_error == pytest.approx(np.sqrt(level * (1 - level) / points))
    assert abs(result.coverage - level) < SIGMAS * result.standard_error + 1e-4
    assert result.coverage == result.inside.mean()
    assert repr(result).endswith(f"level={level}, N={points})")


@pytest.mark.parametrize(("size", "level"), [(1, 0.5), (2, 0.5), (18, 0.9)])
def test_levels_that_so_few_draws_do_not_reach_are_refused(rng, size, level):
    """A new one lies between S draws with probability (S - 1) / (S + 1)."""
    held = f"{(size - 1) / (size + 1):.2f}"
    with pytest.raises(
        ValueError, match=f"`draws` got {size} draws of y, which hold .* {held}"
    ):
        metrics.interval_coverage(rng.normal(size=(size, 30)), np.zeros(30), level)
    metrics.interval_coverage(
        rng.normal(size=(size + 1, 30)), np.zeros(30), size / (size + 2)
    )


def test_coverage_sees_overconfidence_and_its_width_is_the_closed_form(rng):
    draws, y = rng.normal(size=(4, 5000, 400)), rng.normal(scale=2.0, size=400)
    result = metrics.interval_coverage(draws, y, 0.9)
    # A quantile of 20 000 draws has error sqrt(p q / S) / density = 0.015; the mean of
    # 400 widths, 0.0011.
    close(result.mean_width, 2 * scipy.stats.norm.ppf(0.95), atol=5e-3)
    expected = 2 * scipy.stats.norm.cdf(1.645 / 2) - 1
    assert abs(result.coverage - expected) < SIGMAS * np.sqrt(
        expected * (1 - expected) / 400
    )


@pytest.mark.parametrize("size", [1, 200])
def test_pit_is_uniform_for_calibrated_draws(rng, size):
    """Also of counts, with many ties."""
    for values in (
        rng.normal(size=(size + 1, 4000)),
        rng.poisson(0.8, size=(size + 1, 4000)),
    ):
        assert (
            scipy.stats.kstest(
                metrics.pit(values[1:], values[0], rng), "uniform"
            ).pvalue
            > RATE
        )
        equal(
            metrics.pit(values[1:], values[0], 5), metrics.pit(values[1:], values[0], 5)
        )


@pytest.mark.parametrize("scale", [0.7, 1.4])
def test_pit_rejects_overconfident_and_underconfident_draws(rng, scale):
    draws, y = rng.normal(scale=scale, size=(200, 4000)), rng.normal(size=4000)
    assert scipy.stats.kstest(metrics.pit(draws, y, rng), "uniform").pvalue < RATE


# --- classification


@pytest.fixture(scope="module")
def classes():
    """Draws (C, S, N, K) of class probabilities, and labels drawn from their mean."""
    rng = np.random.default_rng(3)
    logits = rng.normal(scale=1.5, size=(1, 1, 3000, 4)) + 0.5 * rng.normal(
        size=(2, 5, 3000, 4)
    )
    probs = scipy.special.softmax(logits, axis=-1)
    mean = probs.mean(axis=(0, 1))
    labels = (mean.cumsum(axis=1) < rng.random((3000, 1))).sum(axis=1)
    return probs, mean, labels


CLASS_SCORES = {
    "accuracy": lambda mean, labels: sklearn.metrics.accuracy_score(
        labels, mean.argmax(axis=1)
    ),
    "log_score": lambda mean, labels: -sklearn.metrics.log_loss(labels, mean),
    "brier": lambda mean, labels: ((mean - np.eye(4)[labels]) ** 2).sum(axis=1).mean(),
}


@pytest.mark.parametrize("name", CLASS_SCORES)
def test_class_scores_are_those_of_scikit_learn_for_draws_of_any_rank(classes, name):
    probs, mean, labels = classes
    score, expected = getattr(metrics, name), CLASS_SCORES[name](mean, labels)
    for form in (mean, probs, probs.reshape(10, 3000, 4), probs.astype(np.float32)):
        result = score(form, labels)
        assert result.value == pytest.approx(expected, rel=1e-6)
        close(result.pointwise, score(mean, labels).pointwise, rtol=1e-5)
        assert result.standard_error == pytest.approx(scipy.stats.sem(result.pointwise))


def test_class_scores_of_two_classes_and_of_what_was_impossible(classes):
    _, mean, labels = classes
    known = (labels == 0).astype(int)
    two = 2 * sklearn.metrics.brier_score_loss(known, mean[:, 0])
    assert metrics.brier(
        np.stack([1 - mean[:, 0], mean[:, 0]], axis=1), known
    ).value == pytest.approx(two)
    assert metrics.log_score([[1.0, 0.0]], [1]).value == -np.inf


def test_ece_of_constant_overconfidence_is_the_gap():
    probs = np.full((100, 3), 0.05)
    probs[:, 1] = 0.9
    result = metrics.ece(probs, [1] * 60 + [0] * 40, bins=10)
    assert result.ece == pytest.approx(0.3)
    assert result.max_gap == pytest.approx(0.3)
    assert result.counts.sum() == result.counts[8] == 100  # bins hold their upper edge
    close([result.confidence[8], result.accuracy[8]], [0.9, 0.6])
    assert np.isnan(np.delete(result.accuracy, 8)).all()
    assert metrics.ece([[1.0, 0.0]] * 5, [0] * 5).ece == 0.0


def test_ece_table_matches_bins_made_one_by_one(classes):
    _, mean, labels = classes
    result = metrics.ece(mean, labels, bins=7)
    top, right = mean.max(axis=1), mean.argmax(axis=1) == labels
    total = 0.0
    for m in range(7):
        held = (top > m / 7) & (top <= (m + 1) / 7)
        assert result.counts[m] == held.sum()
        if held.any():
            assert result.confidence[m] == pytest.approx(top[held].mean())
            assert result.accuracy[m] == pytest.approx(right[held].mean())
            total += held.mean() * abs(top[held].mean() - right[held].mean())
    assert result.ece == pytest.approx(total)


# --- out of distribution


@pytest.mark.parametrize("ties", [False, True])
def test_auroc_matches_scikit_learn(rng, ties):
    known, foreign = rng.normal(size=300), rng.normal(0.8, 1.0, size=200)
    if ties:
        known, foreign = known.round(), foreign.round()
    expected = sklearn.metrics.roc_auc_score(
        np.repeat([0, 1], [300, 200]), np.concatenate([known, foreign])
    )
    assert metrics.auroc(known, foreign).value == pytest.approx(expected, abs=1e-14)
    assert metrics.auroc(foreign, known).value == pytest.approx(1 - expected, abs=1e-14)


def test_auroc_standard_error_is_the_spread_over_repeats(rng):
    repeats = [
        metrics.auroc(rng.normal(size=30), rng.normal(1.0, 1.0, size=400))
        for _ in range(400)
    ]
    spread = np.std([result.value for result in repeats], ddof=1)
    close(np.mean([result.standard_error for result in repeats]), spread, rtol=0.16)
    within([result.value for result in repeats], scipy.stats.norm.cdf(1 / np.sqrt(2)))
    assert metrics.auroc([0.0, 1.0], [2.0, 3.0]) == (1.0, 0.0)


def test_uncertainty_splits_entropy(classes):
    probs, mean, _ = classes
    result = metrics.uncertainty(probs)
    close(result.total, scipy.stats.entropy(mean, axis=-1), rtol=1e-12)
    close(
        result.aleatoric,
        scipy.stats.entropy(probs, axis=-1).mean(axis=(0, 1)),
        rtol=1e-12,
    )
    # The mutual information is also the mean divergence of the draws from their mean.
    divergence = scipy.stats.entropy(
        probs, np.broadcast_to(mean, probs.shape), axis=-1
    ).mean(axis=(0, 1))
    close(result.mutual_information, divergence, rtol=1e-9, atol=1e-14)
    for part in metrics.uncertainty(np.broadcast_to(np.eye(3), (4, 3, 3))):
        equal(part, 0.0)  # certain draws that agree


def test_relative_logit_variance_is_that_of_normal_logits(rng):
    """For l = m + sd z it is sd^2 (K - 1) / |m centered|^2, whatever the shift."""
    mean = np.array([[3.0, 0.0, 0.0], [0.3, 0.0, 0.0]])
    sd = np.array([[0.5], [2.0]])
    draws = 40_000
    shift = rng.normal(scale=100.0, size=(draws, 2, 1))
    logits = mean + sd * rng.normal(size=(draws, 2, 3)) + shift
    result = metrics.relative_logit_variance(logits)
    square = ((mean - mean.mean(-1, keepdims=True)) ** 2).sum(-1)
    expected = 2 * sd[:, 0] ** 2 / square
    # The variance has a relative sd of 1 / sqrt(S) = .005 (2 S degrees of freedom), the
    # mean logits one of sd / (|m| sqrt(S)), doubled by the square: .001 and .08 here.
    # Five of them.
    close(result[0], expected[0], rtol=5 * 0.0055)
    close(result[1], expected[1], rtol=5 * 0.082)
    by_chain = logits.reshape(4, -1, 2, 3)
    close(metrics.relative_logit_variance(7 * by_chain), result, rtol=1e-9)
    agree_or_cancel = np.array(
        [[[1.0, 0.0], [1.0, 0.0], [5.0, 5.0]], [[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]]
    )
    equal(metrics.relative_logit_variance(agree_or_cancel), [0.0, np.inf, 0.0])


# --- function space


def reference_rhat(draws):
    """Rank-normalized split R-hat of Vehtari et al. (2021)."""

    def plain(chains):
        within_chains = chains.var(axis=1, ddof=1).mean()
        between = chains.mean(axis=1).var(ddof=1)
        return np.sqrt(
            (chains.shape[1] - 1) / chains.shape[1] + between / within_chains
        )

    def scaled(chains):
        ranks = scipy.stats.rankdata(chains).reshape(chains.shape)
        return scipy.stats.norm.ppf((ranks - 3 / 8) / (chains.size + 1 / 4))

    half = draws.shape[1] // 2
    split = np.concatenate([draws[:, :half], draws[:, -half:]])
    return max(plain(scaled(split)), plain(scaled(np.abs(split - np.median(split)))))


@pytest.mark.core
def test_function_space_is_rhat_and_ess_column_by_column(rng):
    """A chain is shifted, another wider; one alone compares its halves."""
    draws = rng.normal(size=(4, 301, 3))
    draws[1, :, 0] += 2.0
    draws[2, :, 1] *= 4.0
    for chains in (draws, draws[:1]):
        result = metrics.function_space(chains)
        columns = [chains[..., column] for column in range(3)]
        halves = [
            np.concatenate([c[:, :150], c[:, 151:]]) if len(c) == 1 else c
            for c in columns
        ]
        close(result.rhat, [reference_rhat(half) for half in halves], rtol=1e-10)
        bulk = [float(az.ess(column, method="bulk")) for column in columns]
        tail = [
            float(az.ess(column, method="tail", prob=(0.05, 0.95)))
            for column in columns
        ]
        close(result.ess_bulk, bulk, rtol=1e-12)
        close(result.ess_tail, tail, rtol=1e-12)
    result = metrics.function_space(draws[..., None, :])
    assert (result.rhat > 1.1).tolist() == [[True, True, False]]
    assert result.max_rhat == result.rhat.max()
    assert result.min_ess == min(result.ess_bulk.min(), result.ess_tail.min())


def test_function_space_ignores_inputs_whose_prediction_never_changes(rng):
    draws = rng.normal(size=(2, 100, 3))
    draws[:, :, 1] = 1.0
    result = metrics.function_space(draws)
    assert np.isnan([result.rhat[1], result.ess_bulk[1], result.ess_tail[1]]).all()
    assert result.max_rhat == result.rhat[[0, 2]].max()
    assert np.isfinite(result.min_ess)
    nothing = metrics.function_space(np.zeros((2, 10, 3)))
    assert np.isnan([nothing.max_rhat, nothing.min_ess]).all()


# --- errors
