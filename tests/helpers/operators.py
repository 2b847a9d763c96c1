"""Records the operators of evoattn that calls go through, by torch's profiler: for tests of which way a call takes."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler import profile

__all__ = ["Operators"]

NAMESPACE = "evoattn::"


class Operators:
    """Records this thread and the backwards that it starts. Profiling changes nothing that decides which way a call takes."""

    def __init__(self) -> None:
        self._profile = profile().__enter__()

    def called(self) -> list[str]:
        """Return the operators that were called since the last look, in order, but for those that others call."""
        self.stop()
        events = [event for event in self._profile.function_events if event.name.startswith(NAMESPACE)]
        self._profile = profile().__enter__()
        events.sort(key=lambda event: event.time_range.start)
        return [event.name.removeprefix(NAMESPACE) for event in events if not _is_inside(event)]

    def stop(self) -> None:
        """End the recording."""
        self._profile.__exit__(None, None, None)


def _is_inside(event: Any) -> bool:
    """Tell whether another operator of evoattn calls this one, as its rules for vmap and autocast do."""
    while event.cpu_parent is not None:
        event = event.cpu_parent
        if event.name.startswith(NAMESPACE):
            return True
    return False
