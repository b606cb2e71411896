"""The package itself: what `import autopar` costs and offers, the error's shape, the environment."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.base import environment
from autopar.base.errors import AutoparError


def test_import_is_light() -> None:
    """Breaks if `import autopar` (hence `autopar --help`) waits for torch, transformers or ortools."""
    modules = "import sys, autopar, autopar.machine.mesh, autopar.cost.roofline, autopar.base.environment;"
    code = f"{modules} print([m for m in ('torch', 'transformers', 'ortools') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_loads() -> None:
    """Breaks if a name of API.md is missing, or `autopar.plan` becomes the module of that name."""
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    assert callable(autopar.plan) and callable(autopar.compile) and callable(autopar.pin)
    with pytest.raises(AttributeError, match="no_such_name"):
        autopar.no_such_name  # noqa: B018


@pytest.mark.slow
def test_plan_stays_a_function_after_its_module_is_imported() -> None:
    """Breaks if a module of the name `plan` takes the place of the function."""
    imported = "import autopar; from autopar.api.plan import Plan"
    code = f"{imported}; assert callable(autopar.plan) and autopar.Plan is Plan"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_error_has_one_shape() -> None:
    """Breaks if an error stops reading `what (where). values. remedy`, or loses its parts between processes."""
    error = AutoparError("k_proj cannot split", where="model.layers.0", values="4 heads over tp=8.", remedy="Use tp=4")
    assert str(error) == "k_proj cannot split (model.layers.0). 4 heads over tp=8. Use tp=4."
    assert str(AutoparError("No mesh")) == "No mesh."
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.remedy) == (str(error), "Use tp=4")


def test_environment() -> None:
    """Breaks if a variable of API.md is not read, or empty means on."""
    given = {"AUTOPAR_DUMP": "d", "AUTOPAR_LOGS": "+place,-emit, outline", "AUTOPAR_CHECK": "1", "AUTOPAR_DISABLE": ""}
    read = environment.read(given)
    assert read.dump_dir == Path("d") and read.cache_dir is None and read.check and not read.disable
    assert read.log_levels == (("place", logging.DEBUG), ("emit", logging.ERROR), ("outline", logging.DEBUG))
    assert environment.read({}) == environment.Environment()


@pytest.mark.parametrize(
    ("name", "value"), [("AUTOPAR_CHECK", "maybe"), ("AUTOPAR_LOGS", "+"), ("AUTOPAR_LOGS", "--place")]
)
def test_a_senseless_variable_is_named(name: str, value: str) -> None:
    """Breaks if a typing error in a variable is passed over in silence."""
    with pytest.raises(AutoparError, match=name):
        environment.read({name: value})


def test_log_levels_reach_the_passes_loggers() -> None:
    """Breaks if AUTOPAR_LOGS=+place no longer shows the pass's debug lines."""
    logger = logging.getLogger("autopar.some_pass")
    environment.read({"AUTOPAR_LOGS": "-some_pass"}).apply_log_levels()
    assert logger.level == logging.ERROR
    logger.setLevel(logging.NOTSET)


def test_modules_that_processes_are_started_with_exist() -> None:
    """Breaks if a file is moved whose name stands in a command alone: the demo's workers would not start."""
    root = Path(autopar.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in root.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"-m", "(autopar[\w.]+)"', text)}
    assert named and all(importlib.util.find_spec(name) is not None for name in named), named
