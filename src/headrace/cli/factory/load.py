"""Functions that the user names on the command line: `package.module:name` or `path/to/file.py:name`."""

import importlib
import os
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from headrace.cli.factory.worded import worded


class FactoryFailed(ValueError):
    """The user's function raised; the text says what."""


def load_factory(target: str, makes: str) -> Callable[[], Any]:
    """Import a function that the user names. What it returns raises `FactoryFailed` for whatever that function raises.

    Args:
        target: "package.module:name" or "path/to/file.py:name"; the current folder is searched first.
        makes: What it returns, for errors.

    Raises:
        ValueError: There is no such function, or it cannot be imported.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{target!r} names no factory: expected package.module:name or path/to/file.py:name")
    path = Path(module_name)
    of_file = path.suffix == ".py" or os.sep in module_name
    if of_file:
        if not path.is_file():
            raise ValueError(f"there is no file {module_name}")
        module_name = path.stem
        other = sys.modules.get(module_name)
        if other is not None and getattr(other, "__file__", None) != str(path.resolve()):
            raise ValueError(
                f"{path} cannot be imported, since another module {module_name!r} is loaded: give it another name."
            )
    # Spawned workers import the factory by the same name, and inherit sys.path.
    folder = str(path.resolve().parent) if of_file else os.getcwd()
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    try:
        found = attrgetter(name)(importlib.import_module(module_name))
    except AttributeError as error:
        raise ValueError(f"{module_name} has no {name}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{module_name} cannot be imported: {worded(error)}") from error
    if not callable(found):
        raise ValueError(f"{target} is a {type(found).__name__}: expected a function that returns {makes}.")

    def factory() -> Any:
        try:
            return found()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise FactoryFailed(f"the factory raised {worded(error)}") from error

    return factory
