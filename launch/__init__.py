"""What a person runs."""

if __name__ != "tp_runtime.launch":
    raise ImportError("import tp_runtime.launch, not launch")
