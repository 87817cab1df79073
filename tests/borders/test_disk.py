"""Runs in folders: the draws of ``MCMC``, resumed bit for bit whatever ended them."""

import functools
import importlib.util
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from disk import at_syncs, blocks, contents, draws_of, python, recorder, same, states
from helpers import each, group, mala, refused
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import HMC, MCMC, NUTS, BarkerMH, Gibbs, init_to_value
from zoo import BATCH, NET, NEW_X, ZOO, X, Y, hierarchical, line, spread

import numpyro_bnn as bnn
from numpyro_bnn import infer, metrics, models, priors, runs, symmetry

pytestmark = pytest.mark.core


SPREAD = functools.partial(spread)  # a model that is an object


def barker(model=SPREAD, **options):
    return lambda: BarkerMH(model, **options)


def orbit_moves():
    warm_start = infer.WarmStart(0.3, num_steps=20, held_out=0.2)
    kernel = infer.MCLMC(hierarchical, steps_per_draw=2, warm_start=warm_start)
    return infer.OrbitMoves(kernel, symmetry.find(hierarchical, X, Y))


def gibbs():
    model = models.regression(NET, priors.GammaPrecision(centered=True))
    precisions = [f"net/Dense_{layer}.kernel_precision" for layer in (0, 1)]
    others = HMC(model, trajectory_length=0.2)
    return Gibbs([(infer.PrecisionGibbs(model), precisions), (others, None)])


# Kernel, options of MCMC, keywords of its runs.
IN_TURN = {"num_chains": 2, "chain_method": "sequential", "thinning": 2}
CASES = {
    "Barker": (
        barker(),
        IN_TURN,
        {"extra_fields": ("potential_energy", "accept_prob")},
    ),
    "SGHMC": (
        lambda: infer.SGHMC(spread, 1e-3, steps_per_draw=2, minibatches="epochs"),
        {"thinning": 3},
        {"batch_size": BATCH},
    ),
    "MCLMC in OrbitMoves": (orbit_moves, {"num_chains": 2}, {}),
    "Gibbs": (gibbs, {}, {}),
    "without warm-up": (
        lambda: BarkerMH(spread, adapt_step_size=False),
        {"num_warmup": 0},
        {},
    ),
}


def mcmc_of(name="Barker", kernel=None, **options):
    make, given, _ = CASES[name]
    sizes = {"num_warmup": 8, "num_samples": 12, "chain_method": "vectorized"}
    return MCMC((kernel or make)(), progress_bar=False, **sizes | given | options)


def start(path, name="Barker", mcmc=None, data=(X, Y), seed=1, **options):
    """Start a case or an ``MCMC``, or go on with it."""
    given = {"progress_bar": False, "block_seconds": 100.0, **CASES[name][2], **options}
    mcmc, data = mcmc or mcmc_of(name), map(jnp.asarray, data)
    return runs.start(path, mcmc, jax.random.key(seed), *data, **given)


def result(run):
    return draws_of(run), run.last_state


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Runs by case, in the smallest blocks."""
    smallest = functools.partial(start, block_seconds=1e-9)
    return recorder(lambda: tmp_path_factory.mktemp("runs"), smallest, every=7)


@functools.cache
def of_mcmc(name):
    """What ``MCMC`` itself gives."""
    mcmc = mcmc_of(name)
    mcmc.run(jax.random.key(1), *ZOO["spread"].args, **CASES[name][2])
    return mcmc


# -- the draws of MCMC, whatever ends the process --------------------------------------


@each("name", CASES, fast=1)
def test_the_chains_are_those_of_mcmc_and_go_on_bit_for_bit_wherever_they_are_killed(
    recorded, name
):
    """But for the last bits: two programs may round a transformation differently."""
    whole, mcmc = recorded(name), of_mcmc(name)
    assert whole.result.complete
    assert whole.result.num_draws == 12 // mcmc.thinning
    found, expected = draws_of(whole.result), draws_of(mcmc)
    assert found.keys() == expected.keys()
    for site, value in expected.items():
        assert_allclose(found[site], value, rtol=2e-5, atol=1e-6, err_msg=site)
    cuts = whole.cuts[:: len(whole.cuts) // 4]
    assert len(cuts) >= 4
    for cut in cuts:
        assert same(result(start(cut, name)), result(whole.result)), cut


def test_draws_can_be_added_and_mcmc_is_left_as_it_was(recorded, tmp_path, capsys):
    """One line of progress counts the steps of all calls; without steps, none."""
    mcmc = mcmc_of(num_samples=6)
    for method, steps in ((mcmc, "14/14"), (None, "20/20")):
        run = start(tmp_path, mcmc=method, progress_bar=True)
        shown = capsys.readouterr().err
        assert "step size" in shown
        assert steps in shown
        assert shown.count("\n") == 1
    assert same(result(run), result(recorded("Barker").result))
    less = start(tmp_path, mcmc=mcmc, progress_bar=True)
    assert repr(less) == "Run(num_draws=6, complete=True)"
    assert capsys.readouterr().err == ""
    assert mcmc.last_state is None
    # its kernel was not initialized by the run
    mcmc.run(jax.random.key(1), *ZOO["spread"].args)
    assert mcmc.get_samples()["w"].shape == (6, 2)


def test_ctrl_c_returns_the_finished_draws(recorded, tmp_path, monkeypatch):
    """Also before the state of a block is written, whose draws are then left out."""
    whole = draws_of(recorded("Barker").result)
    for committed, least in ((False, 10), (True, 12)):

        def press(number, is_folder, committed=committed, least=least):
            if blocks(tmp_path) >= least and is_folder == committed:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            at_syncs(patch, press)
            with pytest.warns(
                UserWarning,
                match=r"runs.start: interrupted: \d+ of 6 draws; the same call goes on",
            ):
                part = start(tmp_path, block_seconds=1e-9)
        assert not part.complete
        assert 0 < part.num_draws < 6
        assert same(part.get_samples(True)["w"], whole["w"][:, : part.num_draws])
        assert same(part.last_state.z["w"], whole["w"][:, part.num_draws - 1])
    assert same(draws_of(start(tmp_path)), whole)


def test_a_full_disk_is_reported_and_loses_nothing(recorded, tmp_path, monkeypatch):
    def unfinished():
        known = {"lock", "run.json", "draws.zarr"}
        known |= {file.name for file in states(tmp_path)}
        return {file.name for file in tmp_path.iterdir()} - known

    def full(number, is_folder):
        if blocks(tmp_path) >= 10 and not is_folder and unfinished():
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        at_syncs(patch, full)
        with pytest.raises(
            OSError,
            match=r"argument `folder` got .*No space left on device.*Free space",
        ):
            start(tmp_path, block_seconds=1e-9)
    assert not unfinished()
    assert same(result(start(tmp_path)), result(recorded("Barker").result))


@pytest.mark.slow
def test_while_a_run_is_written_others_read_it_and_do_not_write(tmp_path, monkeypatch):
    seen = []

    def look(number, is_folder):
        if blocks(tmp_path) > 8 and is_folder:
            found = group(bnn.to_inference_data(tmp_path), "posterior")["w"]
            assert np.isfinite(found.to_numpy()).all()
            seen.append(found.shape[1])
            if len(seen) == 1:
                with refused("folder", "another process is writing. Wait for it"):
                    start(tmp_path)

    with monkeypatch.context() as patch:
        at_syncs(patch, look)
        start(tmp_path, block_seconds=1e-9)
    assert seen == sorted(seen)
    assert seen[0] < 6 == seen[-1]


# A kernel as a function of one option, and two values of it.
OPTIONS = {
    "schedule": (
        lambda rate: infer.SGLD(line, optax.linear_schedule(rate, 0.0, 5)),
        0.1,
        0.2,
    ),
    "optimizer": (lambda rate: infer.SGLD(line, optimizer=optax.adam(rate)), 0.1, 0.2),
    "held out": (
        lambda share: infer.MCLMC(
            line, warm_start=infer.WarmStart(0.3, held_out=share)
        ),
        0.0,
        0.1,
    ),
    "array": (
        lambda size: infer.SGLD(line, 0.1, preconditioner=np.full(2, size)),
        1.0,
        2.0,
    ),
    "inner": (lambda eps: infer.ParallelTempering(mala(line, eps)), 0.1, 0.2),
    "block": (
        lambda accept: Gibbs([(HMC(line, target_accept_prob=accept), None)]),
        0.7,
        0.8,
    ),
}


def start_option(root, option, other=0, seed=1):
    make, *values = OPTIONS[option]
    mcmc = mcmc_of("without warm-up", functools.partial(make, values[other]))
    return start(root / option, "without warm-up", mcmc, seed=seed)


def begin_and_be_killed(root):
    """Runs of all options that end with their first state, and one that is killed."""

    def end(path):
        if (path / "run.json").exists():
            raise KeyboardInterrupt

    for option in OPTIONS:
        with pytest.MonkeyPatch.context() as patch:
            at_syncs(patch, lambda *_, path=root / option: end(path))
            with pytest.raises(KeyboardInterrupt):
                start_option(root, option)
    run_of_code(root / "code", name="two")
    at_syncs(
        pytest.MonkeyPatch(),
        lambda *_: blocks(root / "run") >= 10 and signal.raise_signal(signal.SIGKILL),
    )
    start(root / "run", block_seconds=1e-9)


@pytest.mark.slow
def test_runs_go_on_in_another_process_but_not_with_other_options(recorded, tmp_path):
    """The locks of a killed process are free; descriptions do not depend on hashes."""
    path = f"pathlib.Path({str(tmp_path)!r})"
    code = f"import pathlib, test_disk; test_disk.begin_and_be_killed({path})"
    done = subprocess.run(**python(code, PYTHONHASHSEED="1"), check=False)
    assert done.returncode == -signal.SIGKILL
    assert same(draws_of(start(tmp_path / "run")), draws_of(recorded("Barker").result))
    assert run_of_code(tmp_path / "code", SAME_CODE).complete
    for option in OPTIONS:
        with pytest.raises(
            ValueError,
            match=r"the run of something else: rng_key was \w+, is \w+\. Pass",
        ):
            start_option(tmp_path, option, seed=2)  # nothing but the key differs
        with pytest.raises(
            ValueError, match=r"the run of something else: (inner )?option"
        ):
            start_option(tmp_path, option, other=1)


# -- damage and refusals ---------------------------------------------------------------


def of_other_numbers(path):
    """A whole file, with numbers that were not written."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    name = next(
        name for name, array in arrays.items() if array.dtype.kind == "f" and array.size
    )
    np.savez(path, **{**arrays, name: arrays[name] + 1})


def of_other_draws(path):
    import zarr

    zarr.open_group(path.parent / "draws.zarr")["posterior/w"][1, -1] = 0.0


@pytest.mark.parametrize("damage", [of_other_numbers, of_other_draws])
def test_a_damaged_last_block_is_made_again(recorded, tmp_path, damage):
    whole = recorded("Barker")
    path = whole.copy(tmp_path / "run")
    damage(states(path)[-1])
    with pytest.warns(
        UserWarning, match="is damaged: the run goes on from the one before"
    ):
        run = start(path)
    assert same(result(run), result(whole.result))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with two blocks of draws of one site, and its draws."""
    path = tmp_path_factory.mktemp("small") / "run"
    for samples in (3, 6):
        run = start_small(path, samples)
    return path, draws_of(run), bnn.to_inference_data(path)


def start_small(path, samples=6, **options):
    name = "without warm-up"
    mcmc = mcmc_of(name, num_samples=samples)
    return start(path, name, mcmc, sites=("w",), **options)


BYTES = {
    "flipped": lambda file, content, at: file.write_bytes(
        content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]
    ),
    "cut": lambda file, content, at: file.write_bytes(content[:at]),
    "deleted": lambda file, content, at: file.unlink(),
    "of another run": lambda file, content, at: file.write_bytes(content[::-1]),
}
NAMED = (
    r"argument `(folder|result)` got '.*(damaged|lost|no state file|not the folder of "
    r"a run)"
)


def result_or_message(call, path):
    """What a call returns, and the message with which it refuses a folder."""
    try:
        return call(path), None
    except ValueError as error:
        return None, str(error)


@each("damage", BYTES, fast=1)
@pytest.mark.filterwarnings("ignore:.*is damaged. the run goes on")
def test_whatever_file_is_damaged_no_other_numbers_come_back(small, tmp_path, damage):
    """Reading any damaged file or going on is refused by name, or right."""
    path, whole, exported = small
    refused_by = {}
    for number, name in enumerate(contents(path)):
        copied = shutil.copytree(path, tmp_path / str(number))
        file, rng = copied / name, np.random.default_rng(number)
        BYTES[damage](file, file.read_bytes(), int(rng.integers(file.stat().st_size)))
        damaged = contents(copied)
        read, unread = result_or_message(bnn.to_inference_data, copied)
        assert contents(copied) == damaged, name
        run, stopped = result_or_message(start_small, copied)
        assert same(draws_of(run), whole) if run else contents(copied) == damaged, name
        if read:
            held = group(read, "posterior")
            assert held.equals(
                group(exported, "posterior").isel(draw=slice(held.sizes["draw"]))
            ), name
        assert all(
            message is None or re.search(NAMED, message)
            for message in (unread, stopped)
        ), name
        refused_by[name] = unread, stopped
    assert refused_by["draws.zarr/posterior/w/c/0/0/0"][1]
    assert refused_by["draws.zarr/posterior/w/c/0/1/0"][0]


@pytest.mark.filterwarnings("ignore:.*is damaged. the run goes on")
def test_lost_draws_are_not_numbers(small, tmp_path):
    """Of a run in memory too; what is lost is not made anew by a refused call."""
    path = shutil.copytree(small[0], tmp_path / "run")
    run = start_small(path)
    shutil.rmtree(path / "draws.zarr")
    before, lost = contents(path), "draws 0 to 2 are damaged or lost"
    for call in (run.get_samples, lambda: bnn.to_inference_data(run)):
        with refused("folder", f"whose {lost}"):
            call()
    with refused("result", lost):
        bnn.to_inference_data(path)
    with refused("folder", "damaged or lost. Restore the folder from a copy"):
        start_small(path)
    assert contents(path) == before


def test_a_call_that_fails_leaves_nothing(tmp_path):
    """The corrected call is not refused: a run begins with its first state."""

    def begin(folder, size):
        kernel = infer.SGLD(line, 1e-3, steps_per_draw=2, warm_start=0.0)
        mcmc = mcmc_of("without warm-up", kernel=lambda: kernel)
        place = {"w": np.zeros(size, np.float32)}
        return start(tmp_path / folder, "without warm-up", mcmc, init_params=place)

    (tmp_path / "mine").mkdir()
    for folder in ("mine", "new/deep"):
        with pytest.raises((TypeError, ValueError), match="shape"):
            begin(folder, 3)
        assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
    assert begin("new/deep", 2).complete


def test_names_of_folders(small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(small[0], tmp_path / "run")
    run = start_small("~/run")
    expected = group(bnn.to_inference_data("~/run"), "posterior")
    small[2].to_netcdf(tmp_path / "fit.nc")
    assert metrics.health("~/fit.nc").findings == metrics.health(small[2]).findings
    monkeypatch.chdir(tmp_path)
    again = start_small("run")
    monkeypatch.chdir(tmp_path.parent)
    assert same(draws_of(again), draws_of(run))
    assert expected.equals(group(small[2], "posterior"))
    for name in ("", "~nobody-of-this-name/run", "a\0b", b"run", 3):
        for argument, call in (
            ("folder", start_small),
            ("result", bnn.to_inference_data),
        ):
            if argument == "folder" or isinstance(name, str):
                with refused(argument, "Pass the "):
                    call(name)


def test_a_run_is_pickled_with_the_place_of_its_draws(small, tmp_path):
    path = shutil.copytree(small[0], tmp_path / "run")
    run = start_small(path)
    assert same(result(pickle.loads(pickle.dumps(run))), result(run))


def test_folders_that_cannot_be_used(recorded, tmp_path, monkeypatch):
    path = recorded("Barker").copy(tmp_path / "run")
    for state in states(path):
        state.write_bytes(b"")
    with refused("folder", "whose last blocks are all damaged"):
        start(path)
    (path / "run.json").write_text("{")
    with refused("folder", "run.json is damaged"):
        start(path)
    (path / "run.json").write_text('{"format": 1, "description": {}}')
    for argument, call in (("folder", start), ("result", bnn.to_inference_data)):
        with refused(argument, "the run of an older version, which wrote no digests"):
            call(path)
    before = sorted(tmp_path.iterdir())
    for name in ("thesis.tex", "film.mkv.part"):  # of a browser: not ours to remove
        (tmp_path / name).write_text("")
    with refused("folder", "holds other files, such as "):
        start(tmp_path)
    (tmp_path / "film.mkv.part").unlink()
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "thesis.tex"]
    with refused("folder", "which cannot be written", OSError):
        start(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").exists()
    for package in ("zarr", "filelock"):
        with (
            monkeypatch.context() as patch,
            refused("folder", "pip install numpyro_bnn[runs]", ImportError),
        ):
            patch.setitem(sys.modules, package, None)
            start(tmp_path / "none")
        assert not (tmp_path / "none").exists()


def wider(x, y=None):
    """Another prior of the noise, the same sites."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.1))
    with (
        numpyro.handlers.block(hide=["sigma"]),
        numpyro.handlers.substitute(data={"sigma": sigma}),
    ):
        spread(x, y)


def halved(x, y=None):
    with numpyro.handlers.scale(scale=0.5):
        spread(x, y)


KEPT = {"sites": ("w",), "dtype": "float16", "extra_fields": ()}
WAS_KEPT = (
    "sites was None, is .*; dtype was None, is float16; extra_fields was "
    "potential_energy, accept_prob, is "
)


def by(kernel):
    return {"mcmc": mcmc_of(kernel=kernel)}


PLACE = {"w": np.zeros(2, "f4"), "sigma": np.float32(0)}


def test_another_run_is_refused_by_name(recorded, tmp_path, monkeypatch):
    path = recorded("Barker").copy(tmp_path / "run")
    before = sorted(file.name for file in path.rglob("*"))
    for change, named in [
        (by(barker(wider)), "log density of sigma was"),
        (by(barker(halved)), "log density of "),
        (by(barker(line)), "site sigma was latent, .*, is absent"),
        (by(lambda: NUTS(spread)), "kernel was BarkerMH, is NUTS"),
        (by(barker(target_accept_prob=0.5)), "option target_accept_prob was 0.4, is"),
        ({"mcmc": mcmc_of(num_warmup=5, thinning=1)}, "num_warmup was 8, is 5;"),
        ({"mcmc": mcmc_of(num_chains=1)}, "num_chains was 2, is 1"),
        (KEPT, WAS_KEPT),
        ({"data": (X, Y + np.float32(1e-6))}, r"argument \[0\]\[1\] was float32\[24\]"),
        ({"data": (X[:20], Y[:20])}, r"plate data was \(24, None\), is \(20, None\)"),
        ({"seed": 5}, "rng_key was"),
        (by(lambda: NUTS(spread)) | {"init_params": PLACE}, "init_params was"),
    ]:
        with pytest.raises(ValueError, match=f"the run of something else: .*{named}"):
            start(path, **change)
    monkeypatch.setattr("sys.version_info", (4, 0, 0))
    with refused("folder", "version of Python was 3."):
        start(path)
    assert sorted(file.name for file in path.rglob("*")) == before


def sites(*names):
    """A kernel of a model with sites of these names."""

    def model(x, y=None):
        for name in names:
            numpyro.sample(name, dist.Normal(0.0, 1.0))

    return lambda: BarkerMH(model)


@pytest.mark.filterwarnings("ignore:Disabling progress bar")
def test_what_cannot_be_run_in_blocks_is_refused(tmp_path):
    warmed = mcmc_of()
    warmed.post_warmup_state = "the state of another run"
    for number, (argument, change, message) in enumerate(
        [
            ("sites", {"sites": ("v*",)}, "got 'v*'. Known: "),
            ("extra_fields", {"extra_fields": ("step_sizes",)}, "got 'step_sizes'"),
            ("extra_fields", {"extra_fields": ("z_grad",)}, "which is not one array"),
            ("mcmc", by(sites("a/b", "a.b")), "stored as 'a.b' like"),
            ("name", by(sites("..")), "got '..'"),
            ("mcmc", by(lambda: HMC(potential_fn=abs)), "Make the kernel from a model"),
            ("mcmc", {"mcmc": mcmc_of(num_samples=7)}, "Take a multiple of `thinning`"),
            ("mcmc", {"mcmc": mcmc_of(chain_method=jax.pmap)}, "parallel_vectorized"),
            ("mcmc", {"mcmc": warmed}, "the folder keeps the state"),
            ("init_params", {"init_params": {"v": 0.0}}, "BarkerMH, which ignores"),
        ]
    ):
        with refused(argument, message):
            start(tmp_path / str(number), **change)
    assert not list(tmp_path.iterdir())


# -- what is kept, and results of a folder ---------------------------------------------


@pytest.mark.slow
def test_chosen_sites_in_half_precision(recorded, tmp_path):
    """Predictions need all latent sites: others would be drawn from the prior."""
    run = start(tmp_path / "run", sites=("s*", "prec*"), dtype="float16")
    assert set(run.get_samples()) == {"sigma", "precision"}
    assert run.get_samples()["sigma"].dtype == np.float16
    whole = recorded("Barker").result.get_samples()["sigma"]
    assert_allclose(run.get_samples()["sigma"], whole, rtol=1e-3)
    assert run.get_extra_fields()["potential_energy"].dtype == np.float32
    for given in (
        {
            "predictions": {"x": NEW_X},
            "log_likelihood": False,
            "posterior_predictive": False,
        },
        {},
    ):
        with refused("result", "draws without those of w. Keep all sites"):
            bnn.to_inference_data(run, **given)
    found = bnn.to_inference_data(run, log_likelihood=False, posterior_predictive=False)
    assert set(group(found, "posterior").data_vars) == {"sigma", "precision"}
    place = init_to_value(values={"w": jnp.full(2, 9e5), "sigma": 9e5})
    far = barker(init_strategy=place)
    with refused("dtype", "in which a draw of 'w' would be infinite"):
        start(tmp_path / "far", mcmc=mcmc_of(kernel=far), dtype="float16", sites=("w",))


def test_a_run_gives_the_results_of_its_mcmc(recorded):
    """With predictions of what ``start`` returns; a folder has draws and statistics."""
    run = recorded("Barker").result
    mcmc = of_mcmc("Barker")
    new = {"predictions": {"x": NEW_X}}
    assert same(run.mcmc.get_samples()["w"], run.get_samples()["w"])
    found = bnn.to_inference_data(run, **new)
    expected = bnn.to_inference_data(mcmc, **new)
    for name in ("posterior", "predictions", "log_likelihood", "sample_stats"):
        for variable, value in group(expected, name).data_vars.items():
            assert_allclose(group(found, name)[variable], value, rtol=1e-4, atol=1e-4)
    disk = bnn.to_inference_data(recorded("Barker").path)
    assert disk.attrs["algorithm"] == "BarkerMH"
    for name in ("posterior", "sample_stats"):
        assert set(group(disk, name).data_vars) == set(group(found, name).data_vars), (
            name
        )
    assert_array_equal(group(disk, "posterior")["w"], group(found, "posterior")["w"])
    assert group(disk, "posterior")["w"].dims == group(found, "posterior")["w"].dims
    with refused("result", "A folder has no model"):
        bnn.to_inference_data(str(recorded("Barker").path), **new)
    with refused("result", "which is not the folder of a run"):
        bnn.to_inference_data(recorded("Barker").path / "none")


# -- identity: code, what it reads, and the densities of single sites ------------------


CODE = """
from types import SimpleNamespace

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

RATE = 1e-3

class Decay:
    def __init__(self, power):
        self.power = power
    def __call__(self, step):
        return RATE / (1 + step) ** self.power

decay = Decay(1.0)
settings = SimpleNamespace(shrink=0.5, output="here")

def made(rate):
    def faster(step):
        return rate / (3 + step)
    return faster

faster = made(0.25)

def kink(w):
    return jnp.where(jnp.abs(w) > 3.0, jnp.abs(w), 0.0)

def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    bent = kink(w).sum() + 0.0
    numpyro.factor("penalty", -0.5e-3 * (w**2).sum())
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x @ w + bent, 0.5).to_event(0), obs=y)

def schedule(step, scale=1.0):
    parts = [part(step) for part in (decay, faster)]
    return settings.shrink * scale * sum(parts, 0.0)
"""
# What is replaced in the code, and how it is named.
OTHER_CODE = [
    ("RATE = 1e-3", "RATE = 1e-1", r"option step_size, decay.*RATE was 0.001, is 0.1"),
    ("Decay(1.0)", "Decay(0.5)", r"option step_size, decay\.power was 1.0, is 0.5"),
    ("(1 + step)", "(2 + step)", r"option step_size, decay.class.__call__ was code"),
    ("made(0.25)", "made(0.5)", r"option step_size, faster, rate was 0.25, is 0.5"),
    ("(3 + step)", "(3 - step)", r"option step_size, faster was code \w+, is code"),
    ("scale=1.0", "scale=2.0", r"option step_size default 0 was 1.0, is 2.0"),
    ("shrink=0.5", "shrink=0.1", r"option step_size, settings.shrink was 0.5, is 0.1"),
    ("> 3.0", "> 4.0", r"model, kink was code"),
    ("-0.5e-3 *", "-0.5e-2 *", r"model was code"),
]
SAME_CODE = [  # lines, a text, and what nobody reads; then names of variables
    ("def model", "# a comment\n\n\ndef model"),
    ("(x @ w + bent, 0.5)", "(\n  x @ w\n  + bent,\n  0.5,\n)"),
    ("def kink(w):", 'def kink(w):\n    """Of no effect."""'),
    ('output="here"', 'output="there", more=3'),
    *[("RATE", "LEARNING"), ("decay", "shrinking"), ("kink", "bend"), ("w", "zw")],
    *[("rate", "z_rate"), ("schedule", "other"), ("Decay", "Power"), ("bent", "ab")],
]


def run_of_code(path, changes=(), name="one"):
    code = CODE
    for old, new in changes:
        code = (
            re.sub(rf"\b{old}\b", new, code)
            if old.isidentifier()
            else code.replace(old, new)
        )
    code = code.replace('"zw"', '"w"')  # the site keeps its name
    # Python may take a file of one second for another: the name tells them apart.
    file = path.with_name(f"{name}_{zlib.crc32(code.encode())}.py")
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, schedule = module.model, getattr(module, "schedule", None) or module.other
    kernel = infer.SGLD(model, schedule, steps_per_draw=2, warm_start=0.0)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=4, progress_bar=False)
    return runs.start(path, mcmc, jax.random.key(1), X, Y, progress_bar=False)


def test_another_code_is_another_run_and_another_text_of_it_is_the_same(tmp_path):
    """Numbers that 20 draws do not reach, and a site that is small beside others."""
    path = tmp_path / "run"
    whole = draws_of(run_of_code(path))
    before = contents(path)
    for old, new, named in OTHER_CODE:
        with pytest.raises(ValueError, match=f"the run of something else: .*{named}"):
            run_of_code(path, [(old, new)])
        assert contents(path) == before, new
    assert same(draws_of(run_of_code(path, SAME_CODE, name="two")), whole)
