"""Which implementation serves a call: the one place where preferences are walked and refusals collected.

The exception type is the protocol. ValueError and TypeError are the caller's mistake and stop at once;
NotImplementedError means "valid, but not here" and lets the next implementation try. A name is an order: its refusal
reaches the caller. A sequence is an order of preference. None is the default order and always ends in one that accepts.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

IMPLEMENTATIONS = ("cutile", "cuda", "xla", "reference")
KERNELS = ("cutile", "cuda")  # run on NVIDIA GPUs only
DEFAULT = ("cuda", "cutile", "xla")  # a CUDA C++ kernel serves the sizes that models have


def preferences(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """The allowed implementations, most wanted first.

    Raises:
      ValueError: a name is unknown, or the sequence is empty.
      TypeError: neither a string, a sequence of strings, nor None.
    """
    if implementation is None:
        return DEFAULT
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"implementation: expected a name, a sequence of names or None, got {implementation!r} of type "
            f"{type(implementation).__name__}; pass for instance 'xla' or ('cutile', 'xla')."
        )
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(
            f"implementation: expected names out of {IMPLEMENTATIONS}, got {implementation!r}; "
            "correct the name, or pass None to let the library choose."
        )
    return tuple(dict.fromkeys(names))


def first_accepting(op: str, names: Sequence[str], attempt: Callable[[str], T]) -> tuple[str, T]:
    """The first name for which `attempt` does not raise NotImplementedError, with what it returned.

    Raises:
      NotImplementedError: all declined; the message holds every reason, and what to do.
    """
    reasons = {}
    for name in names:
        try:
            return name, attempt(name)
        except NotImplementedError as refusal:
            reasons[name] = refusal
    listed = "; ".join(f"implementation {name!r}: {reason}" for name, reason in reasons.items())
    # Most reasons say it themselves.
    cure = "" if "'xla'" in listed else "; 'xla' takes every call, and None chooses what is fastest here"
    raise NotImplementedError(f"{op}: {listed}{cure}") from (
        next(iter(reasons.values())) if len(reasons) == 1 else None
    )
