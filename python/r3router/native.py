"""The native core, of the same version as the Python half.

Import it from here: a half that was rebuilt without the other is refused before it can behave oddly.
"""

from r3router import __version__

try:
    from r3router import _core as core
except ImportError as error:
    raise ImportError(
        f"the native core of r3router cannot be loaded ({error}); install the wheel, or build it with `make build`"
    ) from error

if core.__version__ != __version__:
    raise ImportError(
        f"the Python half of r3router is {__version__} and the native core is {core.__version__}; "
        "install one wheel, or build again with `make build`"
    )

__all__ = ["core"]
