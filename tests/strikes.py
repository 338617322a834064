"""Something bad in the middle of the steps of this process: for tests of ranks that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.step_plan import StepKind


def strike_before(kind: StepKind, act: Callable[[], object], *, after_step: int = -1) -> None:
    """From now on, call `act` before each step of a kind whose number is beyond `after_step`."""
    from tp_runtime.step_runner import StepRunner

    run = StepRunner.run

    def struck(self: Any, plan: Any) -> Any:
        if plan.kind is kind and plan.step > after_step:
            act()
        return run(self, plan)

    setattr(StepRunner, "run", struck)
