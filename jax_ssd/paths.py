"""dispatch_paths: which implementation a program would run, kernel by kernel, without running it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jax_ssd import op
from jax_ssd.plans import Plan


@dataclasses.dataclass(frozen=True)
class Path:
    """One call of an op of this library in a traced program.

    Attributes:
      op: its name, e.g. "mamba2_forward".
      implementation: what would run.
      shapes: of the operands, as text.
      plan: the kernels, their grids and tiles; None for a pure JAX implementation.
      refusals: implementations that were preferred and declined, with their reasons.
    """

    op: str
    implementation: str
    shapes: str
    plan: Plan | None
    refusals: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.implementation}   ({self.shapes})"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        if self.plan is not None:
            lines += [f"  {line}" for line in self.plan.describe().splitlines()]
        return "\n".join(lines)


def dispatch_paths(function: Callable, *args, platform: str | None = None, **kwargs) -> list[Path]:
    """What every call of this library inside `function(*args, **kwargs)` would run on a platform, and why.

    The function is traced, not run, so arrays may be jax.ShapeDtypeStruct. With derivatives in it (pass jax.grad(f))
    the backward is listed too. Kernels are planned but not compiled; sizes are those of the whole arrays, before
    sharding. Where kernels are asked for by name on a machine without a GPU, and JAX_SSD_TARGET_ARCH is not set,
    tracing fails as the call itself would.

    Args:
      function: any function of JAX arrays, e.g. `jax_ssd.mamba2` itself, a model's call or a training step.
      *args: its arguments.
      platform: "cpu" or "cuda". None: the default backend of this process.
      **kwargs: its keyword arguments. Those that are neither arrays nor trees of them are taken as static.

    Returns:
      One Path per call, in program order; print it to read it.

    Raises:
      ValueError: an unknown platform.
      TypeError: `function` is none.
      NotImplementedError: of the implementations asked for none can serve a call, with every reason.

    Example:
      >>> print(*dispatch_paths(jax_ssd.mamba2, x, dt, A, B, C, platform="cuda"), sep="\\n")
    """
    if platform is None:
        platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    if platform not in ("cpu", "cuda"):
        raise ValueError(f"platform: expected 'cpu' or 'cuda', got {platform!r}; GPUs of NVIDIA are 'cuda' here.")
    return [_path(equation, platform) for equation in calls(function, args, kwargs)]


def calls(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The equations of this library's ops in the traced function, in program order."""
    if not callable(function):
        raise TypeError(
            f"function: expected a function of JAX arrays, got {type(function).__name__}; pass the function itself, "
            "and its arguments after it."
        )
    arrays = {name: value for name, value in kwargs.items() if _holds_arrays(value)}
    static = {name: value for name, value in kwargs.items() if name not in arrays}
    traced = jax.make_jaxpr(lambda args, arrays: function(*args, **arrays, **static))(tuple(args), arrays)
    return [equation for equation in _equations(traced.jaxpr) if _is_ours(equation)]


def _holds_arrays(value: Any) -> bool:
    """Whether it is an array or a tree of nothing else, such as a state."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _is_ours(equation) -> bool:
    return equation.primitive.name in op.DEFINITIONS or _reference_name(equation) is not None


def _reference_name(equation) -> str | None:
    """The op's name if this is the jitted reference, which is plain JAX and no primitive."""
    name = equation.params.get("name")
    named = isinstance(name, str) and name.startswith("_mamba") and name.endswith("_reference")
    return name[1:].removesuffix("_reference") if named else None


def _path(equation, platform: str) -> Path:
    avals = [variable.aval for variable in equation.invars]
    shapes = ", ".join(aval.str_short() for aval in avals)
    reference = _reference_name(equation)
    if reference is not None:
        return Path(reference, "reference", shapes, None, {})
    definition, spec = op.DEFINITIONS[equation.primitive.name], equation.params["spec"]
    refusals = {}
    for name in op.preferences(definition, spec, platform, avals):
        try:
            plan = op.kernel_plan(definition, spec, name, platform, avals)
        except NotImplementedError as refusal:
            refusals[name] = str(refusal)
        else:
            return Path(definition.name, name, shapes, plan, refusals)
    return Path(definition.name, "none", shapes, None, refusals)


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        if _reference_name(equation) is not None or equation.primitive.name in op.DEFINITIONS:
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _equations(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from _equations(inner)
