"""Shared fixtures: fixed seeds, quiet progress bars, the benchmark data folder."""

import os
from pathlib import Path

import jax
import jax.monitoring
import pytest

FLAGS = [
    # Two virtual devices let `chain_method="parallel"` be tested on a machine without accelerators.
    "--xla_force_host_platform_device_count=2",
    # A worker has one core: compiling a program in 32 parts is no faster than compiling it as a whole, and more work.
    "--xla_cpu_parallel_codegen_split_count=1",
]
# These tests mostly compile, and XLA's newer code generator takes twice as long as the older one. Later versions of
# JAX have only the newer one, so the second Python tests that.
if jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
os.environ.setdefault("MPLBACKEND", "Agg")

# NumPyro's setup of a model compiles hundreds of tiny programs; workers share them, also between runs.
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Most tests compile far longer than they run; without optimization, compiling takes half the time."""
    jax.config.update("jax_disable_most_optimizations", item.get_closest_marker("optimized") is None)
    return (yield)


@pytest.fixture
def key():
    """The fixed seed of a test."""
    return jax.random.key(0)


MOST_MEMORY = 3 * 2**30  # bytes of a worker: above it, compiled programs are dropped between files


def memory():
    """Bytes of memory of this process now, or its peak where the system reports only that."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_fit_in_memory():
    """Keep compiled programs across files until a worker grows large."""
    yield
    if memory() > MOST_MEMORY:
        jax.clear_caches()


@pytest.fixture
def closed_figures():
    """Close all figures after the test, and check that it left the settings of Matplotlib unchanged."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    yield
    plt.close("all")
    assert dict(mpl.rcParams) == before


@pytest.fixture
def x64():
    """Run a test in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def data_folder():
    """Folder of the benchmark data; tests that need it are skipped, with the reason, if it does not exist."""
    folder = os.environ.get("NUMPYRO_BNN_DATA")
    if not folder or not Path(folder).is_dir():
        if os.environ.get("NUMPYRO_BNN_REQUIRE_DATA"):
            pytest.fail("NUMPYRO_BNN_REQUIRE_DATA is set, but NUMPYRO_BNN_DATA is not a folder")
        pytest.skip("no benchmark data: set NUMPYRO_BNN_DATA to its folder")
    return Path(folder)


@pytest.fixture
def compiled():
    """Names of the programs compiled since the start of the test."""
    found: list[str] = []

    def note(event, seconds, **labels):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)
