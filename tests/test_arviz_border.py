"""The border to ArviZ: both versions give the same groups, files and diagnostics."""

import arviz as az
import numpy as np
import pytest
import scipy.stats
import xarray as xr

from numpyro_bnn import _arviz

pytestmark = pytest.mark.core


def reference_rhat(draws):
    """Rank-normalized split R-hat of one column, from Vehtari et al. (2021), with SciPy's ranks and normal."""

    def plain(chains):
        within = chains.var(axis=1, ddof=1).mean()
        between = chains.mean(axis=1).var(ddof=1)
        n = chains.shape[1]
        return np.sqrt((n - 1) / n + between / within)

    def scale(chains):
        ranks = scipy.stats.rankdata(chains).reshape(chains.shape)
        return scipy.stats.norm.ppf((ranks - 3 / 8) / (chains.size + 1 / 4))

    half = draws.shape[1] // 2
    split = np.concatenate([draws[:, :half], draws[:, -half:]])
    folded = np.abs(split - np.median(split))
    return max(plain(scale(split)), plain(scale(folded)))


@pytest.fixture(scope="module")
def draws():
    """Four chains of 301 draws of 2 x 3 columns; one has a shifted chain, one a wider chain."""
    values = np.random.default_rng(0).normal(size=(4, 301, 2, 3))
    values[1, :, 0, 1] += 2.0
    values[2, :, 1, 2] *= 4.0
    return values


@pytest.fixture
def idata():
    rng = np.random.default_rng(1)
    posterior = _arviz.dataset(
        {
            "net/w".replace("/", "."): (("chain", "draw", "unit"), rng.normal(size=(2, 5, 3)).astype("float32")),
            "sigma": (("chain", "draw"), rng.normal(size=(2, 5))),
        },
        {"unit": ["a", "b", "ü"], "absent": [1, 2]},
        {"algorithm": "NUTS"},
    )
    stats = _arviz.dataset({"diverging": (("chain", "draw"), rng.random((2, 5)) > 0.5)})
    data = _arviz.dataset({"y": (("data",), np.arange(4))}, {"data": [10, 20, 30, 40]})
    groups = {"posterior": posterior, "sample_stats": stats, "prior": _arviz.dataset({}), "observed_data": data}
    return _arviz.inference_data(groups, {"seed": 3, "step": 0.5, "tempered": True, "package": "numpyro_bnn"})


def same(left, right):
    assert _arviz.group_names(left) == _arviz.group_names(right)
    assert _arviz.attrs(left) == _arviz.attrs(right)
    for name in _arviz.group_names(left):
        xr.testing.assert_identical(_arviz.group(left, name), _arviz.group(right, name))


def test_rhat_matches_an_independent_computation(draws):
    expected = [[reference_rhat(draws[:, :, i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(_arviz.rhat(draws), expected, rtol=1e-10)


def test_rhat_finds_the_shifted_and_the_wider_chain_only(draws):
    np.testing.assert_array_equal(_arviz.rhat(draws) > 1.1, [[False, True, False], [False, False, True]])


def test_rhat_of_one_chain_compares_its_halves(draws):
    one = draws[:1, :, 0, 0]
    expected = reference_rhat(np.concatenate([one[:, :150], one[:, 151:]]))
    np.testing.assert_allclose(_arviz.rhat(one), expected, rtol=1e-10)
    drifting = one + np.linspace(0, 3, 301)
    assert _arviz.rhat(drifting) > 1.1


@pytest.mark.parametrize(("kind", "options"), [("bulk", {}), ("tail", {"prob": (0.05, 0.95)})])
@pytest.mark.parametrize("chains", [1, 4])
def test_ess_agrees_with_arviz_column_by_column(draws, kind, options, chains):
    some = draws[:chains]
    expected = [[float(az.ess(some[:, :, i, j], method=kind, **options)) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(_arviz.ess(some, kind), expected, rtol=1e-12)


def test_ess_of_an_autoregression_is_the_theoretical_one():
    # AR(1) with coefficient 0.6 has S (1 - 0.6) / (1 + 0.6) effective draws. The average of 60 columns of
    # 4 x 1000 draws has a standard error of about 1 % (each column varies by 7 %) and Geyer's truncation
    # costs up to 2 %: 6 % is four standard errors beyond, a failure rate below 1e-4.
    rng = np.random.default_rng(2)
    chain = np.empty((4, 1000, 60))
    chain[:, 0] = rng.normal(size=(4, 60)) / 0.8
    for t in range(1, 1000):
        chain[:, t] = 0.6 * chain[:, t - 1] + rng.normal(size=(4, 60))
    np.testing.assert_allclose(_arviz.ess(chain, "bulk").mean(), 4000 * 0.25, rtol=0.06)


def test_diagnostics_without_a_meaning_are_nan(draws):
    odd = draws[:, :, 0].copy()
    odd[:, :, 0] = 0.1
    odd[0, 0, 1] = np.inf
    for value in (_arviz.rhat(odd), _arviz.ess(odd), _arviz.ess(odd, "tail")):
        np.testing.assert_array_equal(np.isnan(value), [True, True, False])
    assert np.isnan(_arviz.rhat(odd[:, :3])).all()
    assert np.isnan(_arviz.rhat(odd[:1, :7])).all()


def test_rhat_of_chains_that_stand_still_is_huge():
    stuck = np.broadcast_to(np.arange(3.0)[:, None], (3, 50))
    assert _arviz.rhat(stuck) > 1e6


def test_groups_are_what_the_installed_arviz_works_on(idata):
    tree = int(az.__version__.split(".")[0]) >= 1
    assert isinstance(idata, xr.DataTree) == tree
    assert list(az.summary(idata, var_names=["sigma"]).index) == ["sigma"]
    assert _arviz.group_names(idata) == ["posterior", "sample_stats", "observed_data"]
    assert _arviz.attrs(idata) == {"seed": 3, "step": 0.5, "tempered": 1, "package": "numpyro_bnn"}
    posterior = _arviz.group(idata, "posterior")
    assert posterior.attrs == {"algorithm": "NUTS"}
    assert "absent" not in posterior.coords
    np.testing.assert_array_equal(posterior["draw"], np.arange(5))
    np.testing.assert_array_equal(_arviz.group(idata, "observed_data")["data"], [10, 20, 30, 40])


def test_files_of_arviz_hold_everything(idata, tmp_path):
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    back = az.from_netcdf(str(tmp_path / "fit.nc"))
    assert type(back) is type(idata)
    same(idata, back)
    assert _arviz.group(back, "sample_stats")["diverging"].dtype == bool


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: _arviz.dataset({"net/w": (("chain",), [1.0])}), ValueError, r"'net/w'.*write e.g. 'net.w'"),
        (lambda: _arviz.dataset({"x": (("x",), [1.0])}), ValueError, "as a variable and as a dimension"),
        (lambda: _arviz.dataset({"x": (("a", "b"), [1.0])}), ValueError, "Name every axis once"),
        (lambda: _arviz.dataset({"x": (("a",), [1j])}), ValueError, "dtype complex128"),
        (lambda: _arviz.dataset({"x": (("a",), [1.0])}, attrs={"k": [1]}), TypeError, "'k' of type list"),
        (lambda: _arviz.inference_data({}, {"k": None}), TypeError, "'k' of type NoneType"),
        (lambda: _arviz.group_names(3), TypeError, "object of type int"),
        (lambda: _arviz.rhat(np.zeros(5)), ValueError, r"shape \(5,\)"),
        (lambda: _arviz.ess(np.zeros((2, 5)), "middle"), ValueError, "Known: bulk, tail"),
    ],
)
def test_errors_say_what_to_write(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_an_unknown_group_lists_those_there_are(idata):
    with pytest.raises(ValueError, match=r"'prior'.*Known: posterior, sample_stats, observed_data"):
        _arviz.group(idata, "prior")
