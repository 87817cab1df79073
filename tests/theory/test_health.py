"""The health report: every check fires on a failure made for it, and all are silent
where all is well.
"""

import json
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from helpers import group, group_names, results, with_groups
from numpyro.infer import MCMC, NUTS, SVI, BarkerMH, Gibbs, Trace_ELBO
from numpyro.infer.svi import SVIRunResult
from registry import USUAL
from scipy.stats import norm
from zoo import ZOO

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer
from numpyro_bnn.metrics import HealthWarning, health
from numpyro_bnn.metrics.left_out import behind

pytestmark = pytest.mark.core

# -------------------------------------------------------------------------------------
# results made of arrays

C, S, N, SAMPLE = 4, 200, 40, ("chain", "draw")


class Made:
    """A healthy result of a linear network, whose parts a test replaces."""

    def __init__(self, draws=S, chains=C):
        rng = self.rng = np.random.default_rng(0)
        shape = (chains, draws)
        self.x = rng.normal(size=(N, 2))
        self.y = self.x @ [1.0, -1.0] + 0.3 * rng.normal(size=N)
        self.w = [1.0, -1.0] + 0.05 * rng.normal(size=(*shape, 2))
        self.f = self.w @ self.x.T
        self.new = rng.normal(size=(50, 2))
        self.noise = 0.3
        self.impossible = np.zeros((*shape, N))
        self.weight = "net.Dense_0.kernel"
        self.stats = {
            "diverging": np.zeros(shape, bool),
            "n_steps": np.full(shape, 7),
            "configurational_temperature": 1 + 0.1 * rng.normal(size=shape),
            "kinetic_temperature": 1 + 0.1 * rng.normal(size=shape),
        }
        each = lambda value: str([value] * chains)  # noqa: E731
        self.attrs = {
            "algorithm": "MCLMC",
            "num_chains": chains,
            "temperature": 1.0,
            "temperature_band_high": 1.2,
            "target_energy_variance": 4.5e-4,
            "mean_energy_variance": each(4e-4),
            "implied_bias": 0.05,
            "max_tree_depth": 10,
            "pareto_k": 0.3,
            "elbo_rise": 0.0,
            "explained_by_members": json.dumps({"y": [0.95] * chains}),
            "base_step_size": each(0.1),
            "restarts": each(0.0),
            "refused_steps": each(0.01),
            "max_energy_error": 5.0,
            "variance_covered": each(0.9),
            "mean_accept_prob": each(0.6),
            "frozen_chains": "[]",
            "steps_kept": 20_000,
            "steps_needed": 10_000.0,
        }

    def idata(self, dtype=np.float64, without=()):
        rows = {"x": (("data", "x_dim_1"), self.x), "y": (("data",), self.y)}
        densities = norm.logpdf(self.y, self.f, self.noise) + self.impossible
        groups = {
            "posterior": {self.weight: ((*SAMPLE, "in"), self.w)},
            "sample_stats": {
                name: (SAMPLE, value) for name, value in self.stats.items()
            },
            "posterior_predictive": {
                "y": ((*SAMPLE, "data"), self.f),
                "y_mean": ((*SAMPLE, "data"), self.f),
            },
            "log_likelihood": {"y": ((*SAMPLE, "data"), densities)},
            "observed_data": {"y": rows["y"]},
            "constant_data": {"x": rows["x"]},
            "predictions_constant_data": {"x": (("new", "x_dim_1"), self.new)},
        }
        for name in without:
            del groups[name]
        for variables in groups.values():
            for name, (dims, value) in variables.items():
                floats = value.dtype.kind == "f"
                variables[name] = dims, value.astype(dtype) if floats else value
        return results(groups, self.attrs)

    def predicting(self, labels=None, add=False, without=(), **variables):
        """The result with other predictions, of dims and values, and maybe targets."""
        idata = self.idata(without=without)
        old = group(idata, "posterior_predictive")
        new = {name: ((*SAMPLE, *dims), v) for name, (dims, v) in variables.items()}
        changed = {"posterior_predictive": (old if add else old[[]]).assign(**new)}
        if labels is not None:
            observed = group(idata, "observed_data")
            named = {name.split("_")[0]: (("data",), labels) for name in variables}
            changed["observed_data"] = observed.assign(named)
        return with_groups(idata, **changed)


def findings_of(idata):
    """Findings by name of the check."""
    return {finding.name: finding for finding in health(idata).findings}


def all_checks():
    """Names of all checks: a healthy result has a finding of each."""
    return set(findings_of(Made().idata()))


def off(idata):
    """Names of the checks that warn."""
    return [finding.name for finding in health(idata).warnings]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_healthy_result_is_silent_and_every_check_is_made(dtype):
    made = findings_of(Made().idata(dtype))
    assert made.keys() == all_checks()
    assert {finding.verdict for finding in made.values()} == {"ok"}


def attrs(**changes):
    """Other attributes."""
    return lambda made: made.attrs.update(changes)


def stats(name, place, value):
    """Another statistic at a place."""
    return lambda made: made.stats[name].__setitem__(place, value)


def hot(made):
    """Above the band of 1.2, by more than a quarter of the target."""
    made.stats["configurational_temperature"][1] = 1.4


def cold(made):
    """Half the temperature, and below it by more than a quarter of that."""
    for name in ("configurational_temperature", "kinetic_temperature"):
        made.stats[name] *= 0.5
    made.stats["kinetic_temperature"][1] = 0.3
    made.attrs |= {"temperature": 0.5, "temperature_band_high": 0.5}


def unlearned(made):
    made.f = 0.05 * made.f


def energy(value, bias=0.05):
    return attrs(
        mean_energy_variance=f"[0.0004, {value}, 0.0004, 0.0004]", implied_bias=bias
    )


def impossible(value):
    return lambda made: made.impossible.__setitem__((2, 7, 3), value)


def diverged(made):
    made.w[2, 150:] = np.nan
    made.f[2, 150:] = np.nan
    made.attrs["first_divergence"] = "[-1, -1, 17, -1]"


def nan_chain(made):
    made.w[1], made.f[1] = np.nan, np.nan


def holds(chain, draws):
    def change(made):
        for values in (made.w, made.f):
            values[chain, draws] = values[chain, draws.start]

    return change


def nearly_frozen(made):
    made.w[0] = made.w[0, 0] * (1 + 1e-7 * made.rng.normal(size=(S, 1)))
    made.f[0] = made.w[0] @ made.x.T


def dead(*chains):
    """As good as constant; the mean over the chains still explains most."""

    def change(made):
        for c in chains:
            made.w[c] = 0.01 * made.rng.normal(size=(S, 2))
        made.f = made.w @ made.x.T

    return change


def other_mode(made):
    made.w[1, :, 0] += 1.0
    made.f = made.w @ made.x.T


def uncovered(made):
    """In a posterior of a parameter for every third row."""
    made.attrs["variance_covered"] = "[0.9, 0.21, 0.9, 0.9]"
    made.w = np.concatenate([made.w, made.rng.normal(size=(C, S, N // 3 - 2))], -1)


def drifting(made):
    made.w[..., 0] += np.linspace(-0.3, 0.3, S)
    made.f = made.w @ made.x.T


def correlated(made):
    noise = made.rng.normal(size=(C, S, 2))
    for s in range(1, S):
        noise[:, s] = 0.9 * noise[:, s - 1] + 0.19**0.5 * noise[:, s]
    made.w = [1.0, -1.0] + 0.05 * noise
    made.f = made.w @ made.x.T


def heavy_weights(made):
    made.attrs["pareto_k"], made.weight = 0.9, "w"  # of networks it is a note


def years(made):
    made.x[:, 1] = 2000 + 10 * made.x[:, 1]
    made.new = made.x.copy()


def large_targets(made):
    made.y, made.f, made.noise = 300 * made.y, 300 * made.f, 90.0


def constant_column(made):
    made.x[:, 1] = made.new[:, 1] = 1.0


def infinite_input(made):
    made.x[3, 1] = np.inf
    del made.attrs["explained_by_members"]


def far(made):
    made.new[:3], made.new[3], made.new[4, 1] = 20.0, -20.0, np.nan


# What goes wrong, the checks that warn, and words of what they say.
FAILURES = [
    (diverged, ["diverged"], "chain 2 at step 17"),
    (nan_chain, ["diverged"], "chain 1)"),
    (impossible(-np.inf), ["support"], "0.50% of the draws of chain 2 have log"),
    (holds(1, slice(0, S)), ["frozen"], "chain 1 holds one draw for 200 of its 200"),
    (holds(3, slice(20, 40)), ["frozen"], "chain 3 holds one draw for 20 of"),
    (nearly_frozen, ["frozen"], "chain 0"),
    (stats("diverging", (1, slice(30)), True), ["divergences"], "15.0%"),
    (attrs(frozen_chains="[2]"), ["moved"], "chains [2] accept below 1 %"),
    (attrs(frozen_chains="[3, 4]", num_replicas=2), ["moved"], "chains [2] accept"),
    (
        attrs(mean_accept_prob="[0.6, 0.6, 0.6, 0.04]"),
        ["acceptance"],
        "chain 3 accepts 4.0%",
    ),
    (uncovered, ["covered"], "1 covers 21%"),
    (energy("nan"), ["energy_variance"], "chain 1 is nan"),
    (energy("0.1", 0.4), ["energy_variance"], "(implied error of a variance 0.4)"),
    (energy("1e-10"), ["energy_variance"], "chain 1 is 1e-10"),
    (energy("0.0004", 1.66), ["energy_variance"], "a variance 1.7"),
    (
        attrs(refused_steps="[0.0, 0.6, 0.0, 0.0]"),
        ["refused_steps"],
        "chain 1 refused 60%",
    ),
    (attrs(steps_needed=50_000.0), ["steps"], "the gradient noise asks for 5e+04"),
    (
        attrs(variance_covered="[0.9, 1.4, 0.9, 0.9]"),
        ["temperature"],
        "configurational temperature of chain 1 is 1.40",
    ),
    (cold, ["temperature"], "kinetic temperature of chain 1 is 0.30, its target 0.5"),
    (unlearned, ["fit", "linear"], "a linear model predicts each row of y from"),
    (dead(1), ["fit"], "chain 1 explains 0%, its member or the best chain 9"),
    (dead(*range(C)), ["fit", "linear"], "its member or the best chain 95%"),
    (other_mode, ["linear", "rhat"], "within a chain)"),
    (drifting, ["linear", "rhat"], "(at most 2"),
    (correlated, ["ess"], "800 draws are worth"),
    (
        stats("n_steps", (slice(C), slice(0, S, 4)), 1023),
        ["tree_depth"],
        "25% of the trees of",
    ),
    (heavy_weights, ["pareto_k"], "0.90"),
    (attrs(elbo_rise=30.0), ["elbo"], "changes by +30 nats"),
    (attrs(elbo_rise=-30.0), ["elbo"], "changes by -30 nats"),
    (years, ["standardized"], "1 of 2 columns of x are off: column 1 has mean 2e+03"),
    (
        infinite_input,
        ["standardized", "extrapolation"],
        "1 of 2 columns of x are off: column 1",
    ),
    (large_targets, ["standardized"], "1 of 1 columns of y are off: column 0"),
    (constant_column, ["constant_inputs"], "constant columns: 1 of x"),
    (far, ["extrapolation"], "5 of 50 new rows of x"),
]


@pytest.mark.parametrize(("change", "expected", "words"), FAILURES)
def test_every_check_fires_on_its_failure(change, expected, words):
    made = Made()
    change(made)
    findings = health(made.idata()).warnings
    assert [finding.name for finding in findings] == expected
    assert any(words in str(finding) for finding in findings), findings
    assert all(finding.advice.endswith(".") for finding in findings)


def test_a_chain_that_moves_in_one_site_is_not_frozen():
    made = Made()
    made.w[0] = made.w[0, 0]
    idata = made.idata()
    moving = {"v": ((*SAMPLE, "in"), made.rng.normal(size=made.w.shape))}
    assert findings_of(idata)["frozen"].verdict == "warning"
    idata = with_groups(idata, posterior=group(idata, "posterior").assign(moving))
    assert findings_of(idata)["frozen"].verdict == "ok"


def test_small_energy_variances_and_values_of_other_replicas_are_well():
    healthy = Made()
    # Its mean of 1.5 has a standard error of 0.9.
    healthy.stats["kinetic_temperature"][1] = np.linspace(-3.0, 6.0, S)
    healthy.attrs["mean_energy_variance"] = (
        "[1e-7, 1e-7, 1e-7, 1e-7]"  # above a millionth of its target
    )
    healthy.attrs["refused_steps"] = (
        "[0.06, 0.4, 0, 0, 0, 0, 0, 0]"  # two replicas a chain, the first exported
    )
    del healthy.attrs["temperature"]  # then it is 1
    assert off(healthy.idata()) == []
    (found,) = [f for f in health(healthy.idata()).findings if f.verdict == "note"]
    assert found.what == "chain 0 refused 6% of its steps"


@pytest.mark.parametrize(
    ("signs", "autocorrelation"),
    [("+-+-+-+-+-", 0.0), ("++--+---++", 0.3), ("+++++-----", 0.9)],
)
def test_a_temperature_is_judged_by_its_mean_less_four_errors(signs, autocorrelation):
    """Errors are those of an autoregression of ten batches, whose autocorrelation is
    too low by 2 / 10, and is taken for 0 to 0.9.
    """
    made = Made()
    steps = np.repeat([float(f"{sign}1") for sign in signs], S // 10)
    made.stats["kinetic_temperature"][1] = 11 + steps
    error = ((1 + autocorrelation) / (1 - autocorrelation)) ** 0.5 / 9**0.5
    value = findings_of(made.idata())["temperature"].value
    assert value == pytest.approx(10 - 4 * error)


@pytest.mark.parametrize(("bias", "expected"), [(0.4, []), (0.6, ["energy_variance"])])
def test_energies_without_a_target_are_judged_by_their_bias(bias, expected):
    made = Made()
    energy(0.04, bias)(made)
    del made.attrs["target_energy_variance"]
    assert off(made.idata()) == expected


def test_a_fit_that_has_learned_noise_is_behind_a_linear_model():
    """Least squares on 14 features that say nothing: the log scores of rows that are
    left out have a closed form, which weights of 1,000 draws give up to .01 (the
    standard deviation over seeds).
    """
    made = Made(draws=250)
    design = np.c_[np.ones(N), made.x, made.rng.normal(size=(N, 14))]
    basis = np.linalg.qr(design)[0]
    left = 1 - (basis**2).sum(1)
    mean = basis @ (basis.T @ made.y)
    made.f = mean + 0.3 * made.rng.normal(size=(C, 250, 17)) @ basis.T
    exact = norm.logpdf((made.y - mean) / left, scale=0.3 / left**0.5)
    found = findings_of(made.idata())
    nats = behind(exact, [made.x], made.y, "numbers").nats
    assert found["linear"].value == pytest.approx(nats, abs=0.04)
    assert found["linear"].verdict == "warning"
    assert found["fit"].verdict == "ok"


def test_scores_of_all_kinds_of_targets_are_compared():
    """Of draws that all say the same, so that no row has another score without it."""
    made = Made()
    classes = (made.x @ [1.0, -0.2] > 0.6).astype(int) + (made.x[:, 1] > 1)
    counts = 2 * made.rng.poisson(np.exp(made.x[:, 0]))
    probs = (("data", "class"), np.full((C, S, N, 3), 1 / 3))
    for y, kind, predicted in (
        (made.y, "numbers", {}),
        (classes, "classes", {"y_probs": probs}),
        (made.x[:, 0] > 0, "classes", {}),
        (counts, "counts", {}),
    ):
        idata = made.predicting(y.astype(y.dtype.kind.replace("b", "i")), **predicted)
        flat = np.full((C, S, N), -9.0)
        density = group(idata, "log_likelihood").assign(y=((*SAMPLE, "data"), flat))
        observed = group(idata, "observed_data").assign(y=(("data",), 1 * y))
        idata = with_groups(idata, log_likelihood=density, observed_data=observed)
        nats = behind(flat[0, 0], [made.x], y, kind).nats
        assert findings_of(idata)["linear"].value == pytest.approx(nats, abs=1e-12)


def test_inputs_without_a_line_are_not_compared():
    """Nor are targets that do not vary."""
    made = Made()
    made.y, made.noise = made.rng.normal(size=N), 1.0
    made.f = 0.0 * made.f + 0.01 * made.rng.normal(size=made.f.shape)
    assert "linear" not in off(made.idata())
    made.y = np.full(N, 0.1)
    assert {"linear", "fit"}.isdisjoint(off(made.idata()))


def test_numbers_that_pile_up_at_a_border_are_not_compared():
    """Censored ones have probabilities, at most 1, where a line has a density."""
    made = Made()
    cut = np.quantile(made.y, 0.3)
    made.impossible[..., made.y > cut] = -20.0
    assert "linear" in off(made.idata())
    made.y = np.minimum(made.y, cut)
    assert "linear" not in off(made.idata())


def test_rows_of_a_thousand_chains_are_compared():
    """As of an ensemble of short ones: a draw of each is read."""
    made = Made(draws=100, chains=1001)
    assert findings_of(made.idata())["linear"].verdict == "ok"
    unlearned(made)
    assert "linear" in off(made.idata())


def test_what_is_covered_is_judged_by_the_rows_that_no_mask_leaves_out():
    made = Made()
    made.attrs["variance_covered"] = "[0.2]"
    made.w = np.concatenate([made.w, made.rng.normal(size=(C, S, 5))], -1)
    assert findings_of(made.idata())["covered"].verdict == "note"  # 7 of 40 rows
    made.y[10:] = np.nan
    assert findings_of(made.idata())["covered"].verdict == "warning"


def test_every_check_has_a_failure():
    fired = {name for _, names, _ in FAILURES for name in names}
    assert fired | {"restarts", "few_draws"} == all_checks()


def test_notes_are_in_the_table_and_do_not_warn():
    many = Made()
    many.attrs |= {"pareto_k": 0.9, "restarts": str([0.0, 2.0, 0.0, 0.0])}
    many.attrs |= {"refused_steps": "[0.4, 0, 0, 0]", "variance_covered": "[0.1]"}
    found = findings_of(many.idata())
    notes = {name for name, finding in found.items() if finding.verdict == "note"}
    assert notes == {"pareto_k", "restarts", "refused_steps", "covered"}
    assert found["restarts"].what == "chain 1 started again 2 times in warm-up"
    found = findings_of(Made(draws=12).idata())
    assert [f.name for f in found.values() if f.verdict != "ok"] == ["few_draws"]
    assert "rhat" not in found  # few draws are not judged by their mixing
    assert "12 draws in each chain" in found["few_draws"].what


@pytest.mark.parametrize(("nats", "verdict"), [(0.9, "note"), (1.1, "warning")])
def test_a_member_that_learned_the_noise_is_no_trap(nats, verdict):
    """Draws of two parameters lose a nat of the density at the mode, P / 2."""
    made = Made()
    made.f = 0.05 * made.f  # all chains explain a tenth, their members 95 %
    own = norm.logpdf(made.y, made.f, made.noise).sum(2).mean(1)
    made.attrs["log_likelihood_of_members"] = json.dumps((own + nats).tolist())
    assert findings_of(made.idata())["fit"].verdict == verdict


def with_observations(made, noise):
    """Findings where observations are drawn around the function."""
    y = made.f + noise * made.rng.normal(size=made.f.shape)
    return findings_of(made.predicting(add=True, y=(("data",), y)))


@pytest.mark.parametrize("chains", [2, 16])
@pytest.mark.parametrize(("nats", "verdict"), [(0.07, "note"), (0.12, "warning")])
def test_a_chain_that_differs_is_noted_if_that_costs_next_to_nothing(
    chains, nats, verdict
):
    """A mean that is off by d costs d^2 / 2 nats under unit noise, here of one chain,
    however many others there are. The noise of its draws is a twentieth of d.
    """
    made = Made(chains=chains)
    made.f[0] += (2 * nats) ** 0.5 * chains / (chains - 1)
    found = with_observations(made, 1.0)["rhat"]
    assert found.verdict == verdict
    assert ("nats" in found.what) == (verdict == "note")


@pytest.mark.parametrize("wide", [0.0, 5.0])
def test_a_bad_half_of_a_chain_is_never_silent(wide):
    """... even if it makes the spread of its own observations large."""
    made = Made()
    made.f[1, S // 2 :] += 1.0 + wide * made.rng.normal(size=(S // 2, 1))
    assert with_observations(made, 1.0)["rhat"].verdict == "warning"


def spread_apart(made):
    """The draws of one chain spread as far as the noise, or three times."""
    made.f[0] = made.f[0].mean(0) + 3 * made.rng.normal(size=made.f[0].shape)
    y = made.f + made.rng.normal(size=made.f.shape)
    return {"y": (("data",), y), "y_mean": (("data",), made.f)}


def one_output(made):
    """Off by 1.5 standard deviations of its noise, in half of the chains."""
    f = 0.05 * made.rng.normal(size=(C, S, N, 4))
    f[:2, ..., 2] += 1.5
    dims = "data", "output"
    return {"y": (dims, f + made.rng.normal(size=f.shape)), "y_mean": (dims, f)}


def two_classes(made):
    """One chain swaps two of ten at each row; in all others they differ by little."""
    logits = 0.3 * made.rng.normal(size=(C, 1, N, 10))
    logits = logits + 0.02 * made.rng.normal(size=(C, S, N, 10))
    logits[..., np.arange(N), np.where(np.arange(N) % 2, 1, 4)] += 6
    logits[0, ..., [1, 4]] = logits[0, ..., [4, 1]]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return {"y_probs": (("data", "class"), probs)}


@pytest.mark.parametrize("predicted", [spread_apart, one_output, two_classes])
def test_chains_that_differ_in_a_part_are_never_silent(predicted):
    made = Made()
    without = ("observed_data", "log_likelihood")
    idata = made.predicting(without=without, **predicted(made))
    assert findings_of(idata)["rhat"].verdict == "warning"


@pytest.mark.parametrize(("noise", "verdict"), [(1.0, "note"), (0.02, "warning")])
def test_few_effective_draws_are_noted_if_noise_hides_their_error(noise, verdict):
    made = Made()
    correlated(made)
    assert with_observations(made, noise)["ess"].verdict == verdict


@pytest.mark.parametrize(("shift", "verdict"), [(0.6, "note"), (2.5, "warning")])
def test_chains_of_class_probabilities_are_judged_by_their_divergence(shift, verdict):
    """Half of the chains are off in the logit of one of three classes."""
    made = Made()
    logits = 0.02 * made.rng.normal(size=(C, S, N, 3))
    logits[:2, ..., 0] += shift
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    means = probs.mean(1)
    cost = (means * np.log(means / means.mean(0))).sum(-1).mean(-1).max()
    assert (cost < 0.1) == (verdict == "note")
    labels = made.rng.integers(3, size=N)
    idata = made.predicting(labels, y_probs=(("data", "class"), probs))
    found = findings_of(idata)["rhat"]
    assert found.verdict == verdict
    if verdict == "note":
        stated = float(found.what.split()[-2])
        # to third order in the shift, at some of the rows and classes
        assert stated == pytest.approx(cost, rel=0.3)


def test_a_drift_is_no_temperature():
    """... where the kernel reports the covariance of position and gradient."""
    made = Made()
    hot(made)
    assert off(made.idata()) == []
    del made.attrs["variance_covered"]
    assert off(made.idata()) == ["temperature"]


def test_a_temperature_that_wanders_slowly_is_not_known_well():
    made = Made()
    wave = 1.5 * np.sin(2 * np.pi * np.arange(S) / S)  # one slow swing in the run
    made.stats["kinetic_temperature"] = np.tile(3 + wave, (C, 1))
    assert off(made.idata()) == []


def test_faults_of_the_data_are_reported_at_any_number_of_draws():
    made = Made(draws=5)
    made.x[:, 0], made.x[:, 1] = 1000 + 100 * made.x[:, 0], 1.0
    assert off(made.idata()) == ["standardized", "constant_inputs", "extrapolation"]


@pytest.mark.parametrize(
    "group", ["posterior_predictive", "log_likelihood", "sample_stats", "observed_data"]
)
@pytest.mark.parametrize("chains", [1, 2])
def test_checks_need_no_group_and_no_second_chain(group, chains):
    assert off(Made(chains=chains).idata(without=(group,))) == []
    made = Made(chains=chains)
    drifting(made)
    # of the function, or of the log likelihood
    assert "rhat" in off(made.idata(without=(group,)))


def test_inputs_of_models_without_network_are_their_own_affair():
    made = Made()
    made.weight = "w"
    years(made)
    assert off(made.idata()) == []


def test_data_that_an_estimator_standardized_are_judged_as_it_saw_them():
    made = Made()
    years(made)
    made.x[:, 0] = 0.1  # constant, as the estimator may have it
    made.y, made.f = 300 * made.y + 5000, 300 * made.f + 5000
    made.attrs["standardized_inside"] = True
    assert off(made.idata(without=("predictions_constant_data",))) == []


def test_a_single_draw_and_a_result_without_draws_are_not_judged():
    assert off(Made(draws=1, chains=1).idata()) == []
    bare = results({"observed_data": {"y": (("data",), np.zeros(3))}})
    assert [f.name for f in health(bare).findings] == ["diverged", "few_draws"]


def test_chains_keep_their_names_when_some_are_selected():
    made = Made()
    dead(1)(made)
    made.attrs |= {"refused_steps": "[0.0, 0.4, 0.0, 0.0]", "frozen_chains": "[2]"}
    idata = made.idata().sel(chain=[1, 3])
    assert "of y at the training rows chain 1" in health(idata).warnings[-1].what
    assert off(made.idata().sel(chain=[0, 3])) == []


def test_every_output_is_judged():
    """One of ten, at all rows, whose chains differ."""
    draws = np.random.default_rng(0).normal(size=(2, 100, N, 10))
    for bad in (None, 0, 4, 9):
        means = draws + 3 * (np.arange(10) == bad) * np.arange(2)[:, None, None, None]
        dims = (*SAMPLE, "data", "output")
        groups = {"posterior": {"w": (SAMPLE, draws[..., 0, 0])}}
        groups["posterior_predictive"] = {"y_mean": (dims, means)}
        off = [finding.name for finding in health(results(groups)).warnings]
        assert off == ([] if bad is None else ["rhat"]), bad


def test_many_outputs_of_few_independent_draws_are_no_alarm():
    """The worst of forty R-hats is above 1.1 by chance, or far above for a reason."""
    alarms = []
    for seed in range(6):
        draws = np.random.default_rng(seed).normal(size=(1, 100, N, 10))
        for shift in (0.0, 2.0):
            draws[:, 50:, :, 3] += shift
            groups = {"posterior": {"w": (SAMPLE, draws[..., 0, 0])}}
            dims = (*SAMPLE, "data", "output")
            groups["posterior_predictive"] = {"y_mean": (dims, draws)}
            off = [finding.name for finding in health(results(groups)).warnings]
            alarms.append("rhat" in off)
    assert alarms == [False, True] * 6


def test_several_sites_and_classes():
    """The worse of two sites counts; a classifier of one class explains nothing."""
    made = Made()
    labels = (made.x[:, 0] > 0).astype(int)
    good = 0.1 + 0.8 * np.eye(2)[labels] + 0.01 * made.rng.normal(size=(C, S, N, 1))
    dead = good.copy()
    dead[2] = [0.9, 0.1] + 0.01 * made.rng.normal(size=(S, 1, 1))
    for probs, expected in ((good, []), (dead, ["fit"])):
        z = {"z": (("data",), probs.argmax(-1)), "z_probs": (("data", "class"), probs)}
        assert off(made.predicting(labels, add=True, **z)) == expected


def test_the_rise_of_noisy_losses_is_that_between_the_last_tenths():
    """The means of 500 losses of unit noise differ with a standard error of 0.063.

    It is estimated from differences of neighbors among means of 50, which have the
    variance 2 / 50, and here a trend of 0.5; four times the estimate is taken off.
    """
    rng, steps = np.random.default_rng(0), np.arange(5000)
    noise, error = rng.normal(size=5000), (2 / 500) ** 0.5
    guide = guides.AutoMeanField(ZOO["line"].model)

    def rise(losses):
        fit = SVIRunResult(
            {"w_auto_loc": jnp.ones(2), "w_auto_scale": jnp.ones(2)}, None, losses
        )
        options = {
            "num_samples": 2,
            "log_likelihood": False,
            "posterior_predictive": False,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HealthWarning)
            return bnn.to_inference_data(
                fit, guide=guide, args=ZOO["line"].args, **options
            ).attrs["elbo_rise"]

    assert rise(noise) == 0
    expected = 5 - 4 * ((2 / 50 + 0.5**2) / 10) ** 0.5
    assert rise(noise - 0.01 * steps) == pytest.approx(expected, abs=5 * error)
    assert rise(noise + 0.01 * steps) == pytest.approx(-expected, abs=5 * error)


# --------------------------------------------------------------------------------------
# real runs

X = np.random.default_rng(1).normal(size=(60, 2)).astype(np.float32)
Y = (X @ [1.0, -0.5] + 0.3 * np.random.default_rng(2).normal(size=60)).astype(
    np.float32
)
model = bnn.models.regression(bnn.nn.Dense(1), bnn.priors.Normal(1.0))


def run(kernel, *args, warmup=200, draws=200, chains=2, fields=(), **kwargs):
    method = "sequential" if isinstance(kernel, BarkerMH | Gibbs) else "vectorized"
    options = {"num_chains": chains, "chain_method": method, "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, **options)
    mcmc.run(jax.random.key(3), *(args or (X, Y)), extra_fields=fields, **kwargs)
    return mcmc


def verdicts(idata):
    return {row["name"]: row["verdict"] for row in json.loads(idata.attrs["health"])}


tanh = bnn.models.regression(bnn.nn.MLP([2, 1], "tanh"), bnn.priors.Normal(1.0))
fixed = bnn.models.regression(bnn.nn.Dense(1), bnn.priors.Normal(1.0), noise=0.3)
scaled = bnn.models.regression(
    bnn.nn.Dense(1), bnn.priors.GammaPrecision(centered=True)
)
SCALES = ["net/kernel_precision", "net/bias_precision", "sigma"]

HEALTHY = {
    "NUTS": partial(NUTS, model),
    "BarkerMH": partial(BarkerMH, model),
    "OrbitMoves": lambda: infer.OrbitMoves(NUTS(tanh), bnn.symmetry.find(tanh, X, Y)),
    "ParallelTempering": lambda: infer.ParallelTempering(NUTS(model), num_replicas=3),
    "PrecisionGibbs": lambda: Gibbs(
        [(infer.PrecisionGibbs(scaled), SCALES), (NUTS(scaled), None)]
    ),
}
# Cycles are too short here, PSGLD and SGNHT record nothing that SGLD and SGHMC do not.
OURS = [("MALA", None), ("MCLMC", None)]
OURS += [(name, 20) for name in ("SGLD", "SGHMC", "MCLMC")]
CASES = [(kernel, None) for kernel in HEALTHY] + OURS


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "batch_size"), CASES)
def test_healthy_runs_are_silent(kernel, batch_size):
    draws = 1000 if kernel in ("BarkerMH", "MALA") else 200
    made = HEALTHY[kernel]() if kernel in HEALTHY else USUAL[kernel](model)
    fields = {"NUTS": ("num_steps",), "OrbitMoves": ("base.num_steps",)}
    fields = fields.get(kernel, ())
    # of a network, which is worse than a line where there is one
    y = np.tanh(2 * Y) if kernel == "OrbitMoves" else Y
    mcmc = run(made, X, y, batch_size, draws=draws, fields=fields)
    idata = bnn.to_inference_data(mcmc, predictions={"x": X[:9]})  # no warning
    found = verdicts(idata)
    assert set(found.values()) == {"ok"}
    always = {"diverged", "frozen", "fit", "rhat", "ess", "standardized"}
    assert always | {"extrapolation", "few_draws"} <= set(found)
    assert ("tree_depth" in found) == bool(fields)
    assert ("temperature" in found) == isinstance(made, infer.SGMCMCKernel)
    assert ("energy_variance" in found) == isinstance(made, infer.MCLMC)
    assert idata.attrs.get("noisy_gradients", 0) == (batch_size is not None)
    report = [finding._asdict() for finding in health(idata).findings]
    assert json.dumps(report) == idata.attrs["health"]


def fitted(guide, num_steps=2000, rate=0.02):
    svi = SVI(guide.model, guide, numpyro.optim.Adam(rate), Trace_ELBO(num_particles=4))
    return guides.fit(svi, jax.random.key(0), num_steps, X, Y, progress_bar=False)


GUIDES = {
    "AutoMeanField": guides.AutoMeanField,
    "AutoBlocks": lambda model: guides.AutoBlocks(model, {"*": guides.FullRank()}),
    "AutoADF": guides.AutoADF,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_healthy_fits_are_silent(name):
    """Of a linear model; more epochs of ADF would count rows twice."""
    guide = GUIDES[name](fixed)
    adf = {"num_epochs": 1, "progress_bar": False}
    result = (
        guide.run(jax.random.key(0), X, Y, **adf)
        if name == "AutoADF"
        else fitted(guide)
    )
    expected = {"diverged", "support", "fit", "linear", "pareto_k", "standardized"}
    expected |= {"constant_inputs", "few_draws"}
    expected |= set() if name == "AutoADF" else {"elbo"}
    # no warning
    found = verdicts(bnn.to_inference_data(result, guide=guide, args=(X, Y)))
    assert found == dict.fromkeys(expected, "ok")


def test_a_fit_that_is_not_finished_is_reported_once():
    guide = guides.AutoMeanField(fixed)
    says = r"2 of \d+ checks failed:\n- linear: (?s:.)*\n- elbo: .* by \+[\d.]+ nats"
    with pytest.warns(HealthWarning, match=says) as caught:
        idata = bnn.to_inference_data(
            fitted(guide, 300, rate=0.003), guide=guide, args=(X, Y)
        )
    # it points at the user's line
    assert [warning.filename for warning in caught] == [__file__]
    assert verdicts(idata)["elbo"] == "warning"


@pytest.mark.slow
def test_members_are_evaluated_with_the_draws():
    """What the members explain is what their own export gives."""
    mcmc = run(infer.MCLMC(tanh, steps_per_draw=20), draws=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)
        idata = bnn.to_inference_data(mcmc, log_likelihood=False)
        members = bnn.to_inference_data(mcmc, members=True, log_likelihood=False)
    found = json.loads(idata.attrs["explained_by_members"])["y"]
    mean = group(members, "posterior_predictive")["y_mean"].to_numpy()[:, 0]
    expected = 1 - ((mean - Y) ** 2).sum(1) / ((Y - Y.mean()) ** 2).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_report_survives_a_file(tmp_path):
    made = Made()
    energy("nan")(made)
    report = health(made.idata())
    assert len(str(report).splitlines()) == len(report.findings)
    made.idata().to_netcdf(str(tmp_path / "fit.nc"))
    assert str(health(tmp_path / "fit.nc")) == str(report)


def test_advice_fits_the_kernel():
    """Tempering needs exact gradients, and is no advice for chains on minibatches."""
    apart, advice = Made(), {}
    other_mode(apart)
    for noisy in (0, 1):
        apart.attrs["noisy_gradients"] = noisy
        (advice[noisy],) = [
            found.advice
            for found in health(apart.idata()).warnings
            if found.name == "rhat"
        ]
    assert advice == {0: f"{advice[1][:-1]}, or `ParallelTempering`.", 1: advice[1]}
    assert advice[1].endswith("a longer warm start.")


def test_one_infinite_value_of_many_is_reported():
    """All parameters are looked at, whichever are judged."""
    w = np.random.default_rng(0).normal(size=(2, 50, 1000))
    w[1, 20, 751] = np.inf
    assert health(results({"posterior": {"w": ((*SAMPLE, "w_dim_0"), w)}})).marked == (
        1,
    )


def test_a_result_whose_chains_are_all_at_fault_has_a_report():
    made = Made()
    made.w[:] = made.w[:, :1]
    report = health(made.idata())
    assert report.marked == tuple(range(C))
    assert "rhat" not in {finding.name for finding in report.findings}


def test_many_training_rows_are_judged_by_some_of_them():
    """Where so many are not predicted unless asked for; and only if a row says the same
    alone, which that of a model with a trend by its place does not.
    """

    def model(x, y=None, trend=False):
        w = numpyro.sample("net/kernel", numpyro.distributions.Normal(0, 1).expand([2]))
        place = jnp.arange(len(x)) / len(x) if trend else 0.0
        with numpyro.plate("data", len(x)):
            fn = numpyro.distributions.Normal(x @ w + place, 0.3)
            numpyro.sample("y", fn, obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(10_001, 2)).astype(np.float32)
    y = (x @ [1.0, -1.0] + 0.3 * rng.normal(size=len(x))).astype(np.float32)
    kernel = BarkerMH(model, step_size=1e-5, adapt_step_size=False)

    def found(asked=None, **options):
        mcmc = run(kernel, x, y, warmup=0, draws=100, chains=1, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            idata = bnn.to_inference_data(mcmc, posterior_predictive=asked)
        assert ("posterior_predictive" in group_names(idata)) == bool(asked)
        return findings_of(idata)

    assert "fit" not in found(trend=True)
    all_rows, some_rows = found(asked=True), found()
    for name in ("fit", "linear"):
        assert all_rows[name].verdict == some_rows[name].verdict
        value = pytest.approx(all_rows[name].value, abs=1e-5)
        assert some_rows[name].value == value
    assert some_rows["linear"].verdict == "warning"


def test_shares_of_chains_that_an_estimator_kept():
    """It records them without those at fault, whose labels are missing."""
    made = Made()
    shares = json.dumps({"y": [0.9] * C})
    recorded = {"explained_by_chains": shares, "num_chains": C + 1}
    groups = {"posterior": {made.weight: ((*SAMPLE, "in"), made.w)}}
    labels = [*range(C - 1), C]
    idata = results(groups, recorded, {"chain": labels})
    assert "fit" in findings_of(idata)
