"""Router for RL rollouts on SGLang. The command line is `python -m r3router`; the native core is `r3router._core`."""

__version__ = "0.1.0"

__all__ = ["__version__"]
