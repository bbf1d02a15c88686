"""Client of flextensord: weights that a daemon owns and streams to the GPU."""

from flextensord._native import Client, FlextensordError, Manager, __version__

__all__ = ["Client", "FlextensordError", "Manager", "__version__"]
