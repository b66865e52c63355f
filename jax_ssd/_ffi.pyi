from typing import Any

PLAN_VERSION: int
XLA_FFI_VERSION: tuple[int, int]

def registrations() -> dict[str, dict[str, Any]]:
    """FFI target name -> stage name -> capsule of the handler."""

def types() -> dict[str, Any]:
    """FFI type name -> capsules of its id and its description; register these first."""

def describe_plan(plan: bytes, cubin_bytes: int) -> str:
    """Decode a plan as the handler does and return it as text; ValueError when it is malformed."""

def live_cubins() -> int:
    """Distinct cubins in use by the executables of this process."""
