"""headrace: a drop-in torch.utils.data.DataLoader that splits every epoch exactly over ranks."""

import typing as _typing
from importlib import import_module as _import_module

from headrace.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from headrace.public import *  # noqa: F403
    from headrace.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Import all of the package when it is first asked for something: `headrace --help` needs no torch."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = _import_module("headrace.public")
        globals().update({one: getattr(public, one) for one in ("__all__", *public.__all__)})
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        __getattr__("__all__")
        return sorted(globals())
