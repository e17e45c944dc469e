"""Which tests run in one process of xdist, and in which order: long groups first, so that all end together.

The mark xdist_group of pytest-xdist 3.8 does nothing with pytest 9.2, whose node ids it can no longer change,
so groups are found here by a part of the id.
"""

import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, here and in every process of a test
    import interpreter  # noqa: F401

CACHE = tempfile.TemporaryDirectory()  # not the user's, in which `probe` and `profile` keep what they find
os.environ["LOCKSTEP_CACHE"] = CACHE.name
torch.set_num_threads(1)  # as runs do; two processes of two threads, which wait by spinning, take far longer
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # a busy one may take its time for an example

GROUPS = {
    "[lenet5-": "lenet5",  # they share the run by one worker that they are compared with
    "test_the_wire_precision_is_part_of_the_run": "lenet5",
    "[resnet18-": "resnet18",
    "[googlenet-": "googlenet",
    "[chain-fused-": "chain",
    "[residual-fused-": "residual",
    "[residual-compiled-": "compiled",
    "test_kernels_compile[": "compile",  # what one of them compiles
    "runs/test_resume.py": "resume",  # and these what is trained once for the module
    "report/test_page.py": "page",
    "report/test_planned.py": "planned",
    "structure/test_site.py": "site",
    "structure/test_wheel.py": "wheel",
    "cli/test_verify.py": "verify",
    "cli/test_trained.py": "trained",
    "lightning/test_lane_strategy.py": "lightning",
    "test_what_listens_there_is_no_worker": "waits",  # they sleep, so they run beside those that do not
    "test_a_host_that_cannot_be_reached": "waits",
}


def group(nodeid):
    return next((name for part, name in GROUPS.items() if part in nodeid), nodeid)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: group(item.nodeid) == item.nodeid)


@pytest.fixture(scope="session")
def by_one_worker(tmp_path_factory):
    """The summary of a small run with some overrides by one worker, which trains it once."""
    from small import small_run, train  # after what is set above is read

    known = {}

    def find(*overrides):
        if overrides not in known:
            result, _ = train(small_run(*overrides), tmp_path_factory.mktemp("alone"))
            known[overrides] = result.summary
        return known[overrides]

    return find


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group(nodeid)

    return ByGroup(config, log)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A window of a real browser."""
    from browser import Browser, find_browser

    program = find_browser()
    if not program:
        pytest.skip("no Chromium or Chrome is installed")
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
