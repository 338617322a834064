"""The measuring child: `python -m tp_runtime.selection.child PARENT_PID`.

Reads one JSON request from stdin and writes one JSON event per line to stdout.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tp_runtime.errors import TpRuntimeError
from tp_runtime.orphans import end_with_parent
from tp_runtime.selection.bench import BenchRequest


def main() -> int:
    end_with_parent(int(sys.argv[1]))
    # what a library prints must not get between the events
    events = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    request = BenchRequest.from_dict(json.load(sys.stdin))
    from tp_runtime.selection.bench_runner import run_cells

    emit({"event": "started"})
    try:
        run_cells(request, emit)
    except TpRuntimeError as error:
        emit({"event": "failed", "reason": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
