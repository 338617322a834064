"""One-to-all channel between the ranks of one host. Imports no torch."""

if __name__ != "tp_runtime.broadcast":
    raise ImportError("import tp_runtime.broadcast, not broadcast")
