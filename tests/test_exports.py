"""The public face: small, complete, and importing it starts nothing."""

import inspect
import re
import subprocess
import sys
from importlib import metadata

import headrace

PROBE = """
import sys, threading, multiprocessing, random, numpy, torch
torch.manual_seed(1); random.seed(1); numpy.random.seed(1)
before = torch.get_rng_state().sum().item(), random.getstate(), numpy.random.get_state()[1].tolist()
import headrace
headrace.DataLoader
after = torch.get_rng_state().sum().item(), random.getstate(), numpy.random.get_state()[1].tolist()
assert before == after, "random state touched"
assert threading.active_count() == 1, threading.enumerate()
assert not multiprocessing.active_children()
headrace.DataLoader([1], num_workers=1, executor="ray")
optional = {"typer", "rich", "sklearn", "lightning", "accelerate", "ray", "transformers"}
assert not optional & sys.modules.keys(), optional & sys.modules.keys()
"""


def test_all_is_the_whole_face() -> None:
    assert headrace.DataLoader
    public = {
        name for name, value in vars(headrace).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(headrace.__all__)
    assert headrace.__all__ == sorted(headrace.__all__)


def test_a_name_is_found_where_it_is_and_nothing_else() -> None:
    """The package imports its parts when it is first asked for one."""
    job = """
import sys, headrace
assert not {"torch", "numpy"} & sys.modules.keys()
assert not hasattr(headrace, "__wrapped__") and "torch" not in sys.modules
assert headrace.plan.Plan is headrace.Plan
from headrace import *
assert DataLoader is headrace.DataLoader and set(headrace.__all__) <= set(globals())
try:
    headrace.DataLoder
except AttributeError as error:
    assert "'headrace' has no attribute 'DataLoder'" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", job], timeout=180, check=True)


def test_every_public_name_has_a_docstring() -> None:
    for name in headrace.__all__:
        assert inspect.getdoc(getattr(headrace, name)), name


def test_import_does_not_mind_the_default_device() -> None:
    job = "import torch; torch.set_default_device('meta'); import headrace"
    subprocess.run([sys.executable, "-c", job], timeout=180, check=True)


def test_import_starts_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", headrace.__version__)
    assert metadata.version("headrace") == headrace.__version__
