"""What all tests share: settings of JAX, fixtures, and the seconds of a processor that
each file takes.
"""

import gc
import os
import time
from collections import Counter
from pathlib import Path

import jax
import jax.monitoring
import pytest

FLAGS = [
    # Two virtual devices let `chain_method="parallel"` be tested on a machine without
    # accelerators.
    "--xla_force_host_platform_device_count=2",
    # A worker has one core: compiling a program in 32 parts is no faster than compiling
    # it as a whole, and more work.
    "--xla_cpu_parallel_codegen_split_count=1",
]
# These tests mostly compile, and XLA's newer code generator takes twice as long as the
# older one. Later versions of JAX have only the newer one, so the second Python tests
# that.
if jax.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
os.environ.setdefault("MPLBACKEND", "Agg")

# NumPyro's setup of a model compiles hundreds of tiny programs; workers share them,
# also between runs.
CACHE = (
    os.environ.get("NUMPYRO_BNN_TEST_CACHE")
    or Path(__file__).parent.parent / ".pytest_cache" / "jax"
)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

gc.disable()  # imports make many objects and no garbage
# Tracing makes many objects that stay: at the usual numbers, looking at all of them
# again and again is a twentieth of the time.
OBJECTS_BETWEEN_COLLECTIONS = (50_000, 20, 100)

# What importing the libraries costs on this machine, today: the measure for what the
# tests may add to it when they are collected.
start_of_imports = time.process_time()
import arviz  # noqa: E402, F401
import numpyro  # noqa: E402, F401

import numpyro_bnn  # noqa: E402, F401

LIBRARIES_SECONDS = time.process_time() - start_of_imports

MEMORY_LIMIT_BYTES = (
    3 * 2**30
)  # of a worker: above it, compiled programs are dropped between files
SLOWEST_FILES = 10


# -- compiling -------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Most tests compile longer than they run; without optimization half as long."""
    jax.config.update(
        "jax_disable_most_optimizations", item.get_closest_marker("optimized") is None
    )
    return (yield)


def resident_bytes():
    """Memory of this process now, or its peak where the system reports only that."""
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
    if resident_bytes() > MEMORY_LIMIT_BYTES:
        jax.clear_caches()
        gc.collect()


# -- seconds of a processor, by file and in collection ---------------------------------


def computes():
    """Whether JAX has started a device: from then on it refuses another
    number of them.
    """
    try:
        for number in (2, jax.config.jax_num_cpu_devices):
            jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        return True
    return False


class ProcessorSeconds:
    """Adds up what the tests of each file take; the terminal shows the slowest."""

    def __init__(self):
        self.by_file = Counter()
        self.collection = (
            Counter()
        )  # file -> the most that any worker took to import it
        self.collection_of_worker = 0.0
        self.libraries = LIBRARIES_SECONDS
        self.computed = ""  # the first file that uses a device when it is imported

    def pytest_collection_finish(self, session):
        gc.freeze()  # what was imported stays
        gc.set_threshold(*OBJECTS_BETWEEN_COLLECTIONS)
        gc.enable()
        if self.computed and not getattr(session.config, "workerinput", None):
            raise pytest.UsageError(
                f"{self.computed} computes at import: every worker pays for it, put it "
                f"in a function"
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        start = time.process_time()
        report = yield
        if isinstance(collector, pytest.Module):
            if not self.by_file and not self.computed and computes():
                self.computed = collector.nodeid
            seconds = time.process_time() - start
            self.collection[collector.nodeid] = max(
                seconds, self.collection[collector.nodeid]
            )
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        start = time.process_time()
        result = yield
        self.by_file[item.nodeid.split("::")[0]] += time.process_time() - start
        return result

    def pytest_sessionfinish(self, session):
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["seconds"] = (dict(self.by_file), dict(self.collection))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        by_file, collection = getattr(node, "workeroutput", {}).get("seconds", ({}, {}))
        self.by_file.update(by_file)
        self.collection_of_worker = max(
            self.collection_of_worker, sum(collection.values())
        )
        for name, seconds in collection.items():
            self.collection[name] = max(seconds, self.collection[name])

    def pytest_terminal_summary(self, terminalreporter):
        if not self.collection_of_worker:  # no workers: this process collected
            self.collection_of_worker = sum(self.collection.values())
        write = terminalreporter.write_line
        terminalreporter.section("seconds of a processor")
        write(f"{sum(self.by_file.values()):8.1f} s  all tests")
        for name, seconds in self.by_file.most_common(SLOWEST_FILES):
            write(f"{seconds:8.1f} s  {name}")
        write(f"{self.collection_of_worker:8.1f} s  collection, in the slowest worker")
        for name, seconds in self.collection.most_common(3):
            write(f"{seconds:8.1f} s  {name}")


def pytest_configure(config):
    config.pluginmanager.register(ProcessorSeconds(), "processor_seconds")


# -- fixtures --------------------------------------------------------------------------


@pytest.fixture
def key():
    """The fixed seed of a test."""
    return jax.random.key(0)


@pytest.fixture
def closed_figures():
    """Close all figures after the test; Matplotlib's settings are unchanged."""
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
    """Folder of the benchmark data; tests that need it are skipped without it."""
    folder = os.environ.get("NUMPYRO_BNN_DATA")
    if not folder or not Path(folder).is_dir():
        if os.environ.get("NUMPYRO_BNN_REQUIRE_DATA"):
            pytest.fail(
                "NUMPYRO_BNN_REQUIRE_DATA is set, but NUMPYRO_BNN_DATA is not a folder"
            )
        pytest.skip("no benchmark data: set NUMPYRO_BNN_DATA to its folder")
    return Path(folder)


@pytest.fixture
def compiled():
    """One entry for every program compiled since the start of the test."""
    programs: list[str] = []

    def note(event, seconds, **labels):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield programs
    jax.monitoring.unregister_event_duration_listener(note)
