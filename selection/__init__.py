"""Which decode attention backend, when."""

if __name__ != "tp_runtime.selection":
    raise ImportError("import tp_runtime.selection, not selection")
