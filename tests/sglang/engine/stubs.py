"""Import-time stand-ins that let SGLang's server start on a CPU-only machine.

`install()` puts a finder on sys.meta_path that answers for packages which are
not installed here (torchvision, sgl_kernel, ...) with modules whose attributes
are permissive placeholders.  Importing SGLang then works; calling a placeholder
raises, so that a missing kernel is noticed instead of computing nonsense.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


class _Missing:
    """Class-like placeholder: may be subclassed, called as decorator fails loudly."""

    def __init_subclass__(cls, **kw):
        super().__init_subclass__()

    def __init__(self, *a, **k):
        raise NotImplementedError(f"stub {type(self).__name__} was instantiated")


class StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        if name[:1].isupper() and not name.isupper():
            val = type(name, (_Missing,), {"__module__": self.__name__})
        else:

            def val(*a, __full=full, **k):
                raise NotImplementedError(f"stub {__full} was called")

            val.__name__ = name
        setattr(self, name, val)
        return val


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots, absent=()):
        self.roots = set(roots)
        self.absent = set(absent)  # submodules that must raise ModuleNotFoundError
        self.fill = {}  # module name -> dict of attributes

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in self.roots and fullname not in self.absent:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        m = StubModule(spec.name)
        m.__path__ = []
        return m

    def exec_module(self, module):
        for k, v in self.fill.get(module.__name__, {}).items():
            setattr(module, k, v)


def install(roots, absent=()):
    roots = [r for r in roots if importlib.util.find_spec(r) is None]
    f = StubFinder(roots, absent)
    sys.meta_path.append(f)
    return f
