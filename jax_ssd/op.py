"""How an operation of this library becomes part of JAX: built once here, used by every op.

From the inside out: a primitive, whose result types follow from its operands' types and whose lowering is chosen per
platform; custom_partitioning, so that the compiler shards it instead of gathering its operands; custom_vmap, which
folds mapped axes into the batch axis so that any vmap is still one call. Differentiation rules are put around it by the
op's own vjp module. An op works on a flat list of arrays whose axes are named by letters (see partition.py) and on a
hashable `spec` that says which arrays are present and holds every static option.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ssd import compile, dispatch, ffi_targets, launch, partition, tune
from jax_ssd.plans import Plan

Function = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Definition:
    """What distinguishes one op from another.

    Attributes:
      name: appears in lowered programs and in error messages.
      letters: spec -> (operand axis letters, result axis letters), one string per array, e.g. "bthp".
      abstract: (spec, operand avals) -> result avals, made by updating an operand's aval so that manual axes survive.
      plain: (spec, "xla" or "reference") -> the function of the operands in pure JAX, which takes every call.
      plan: (spec, implementation, operand avals) -> the launch plan of its kernels. Raises NotImplementedError with the
        reason if there are no kernels for the call.
      padding: (spec, implementation, operand avals) -> the sizes that the kernels want axes padded to, by letter. Zeros
        there must not change the results elsewhere.
      optional: letters of axes that may have size zero in a call that is not empty.
    """

    name: str
    letters: Callable[[Any], tuple[tuple[str, ...], tuple[str, ...]]]
    abstract: Callable[[Any, Sequence[ShapedArray]], list[ShapedArray]]
    plain: Callable[[Any, str], Function]
    plan: Callable[[Any, str, Sequence[ShapedArray]], Plan]
    padding: Callable[[Any, str, Sequence[ShapedArray]], Mapping[str, int]] = lambda spec, name, avals: {}
    optional: str = ""


DEFINITIONS: dict[str, Definition] = {}


def define(definition: Definition) -> Callable[..., tuple[jax.Array, ...]]:
    """Build the stack; the result takes (spec, *operands). `spec.implementation` is the tuple of allowed names."""
    primitive = Primitive(f"jax_ssd_{definition.name}")
    primitive.multiple_results = True
    DEFINITIONS[primitive.name] = definition

    @primitive.def_abstract_eval
    def _(*avals, spec):
        return definition.abstract(spec, avals)

    @primitive.def_impl
    def _(*operands, spec):
        # The only way to run it, so also where the caller has switched jit off.
        with jax.disable_jit(False):
            return jax.jit(functools.partial(primitive.bind, spec=spec))(*operands)

    def lower(platform, context, *operands, spec):
        _, function = dispatch.first_accepting(
            definition.name,
            preferences(definition, spec, platform, context.avals_in),
            lambda name: implementation(definition, spec, name, platform, context.avals_in, _gpus(context)),
        )
        return mlir.lower_fun(function, multiple_results=True)(context, *operands)

    mlir.register_lowering(primitive, functools.partial(lower, "cpu"))
    mlir.register_lowering(primitive, functools.partial(lower, "cuda"), platform="cuda")

    @functools.cache
    def stacked(spec) -> Function:
        operand_letters, result_letters = definition.letters(spec)
        sharded = partition.partitioned(
            lambda *operands: tuple(primitive.bind(*operands, spec=spec)), operand_letters, result_letters
        )
        batched = jax.custom_batching.custom_vmap(sharded)

        @batched.def_vmap
        def _(axis_size, mapped, *operands):
            batch = _batch(mapped, operands, operand_letters)
            results = batched(*fold(axis_size, mapped, operands, operand_letters))
            unfolded = tuple(r.reshape(axis_size, batch, *r.shape[1:]) for r in results)
            return unfolded, (True,) * len(unfolded)

        return batched

    # One jit around the stack: an eager call on sharded arrays is partitioned too.
    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def call(spec, *operands):
        return over_explicit_axes(definition.letters(spec), stacked(spec))(*operands)

    return call


def over_explicit_axes(letters: tuple[Sequence[str], Sequence[str]], function: Function) -> Function:
    """`function`, also where shardings are part of its operands' types: inside, the compiler chooses.

    letters: the axes of operands and of results, as in Definition.letters.
    """

    def run(*operands):
        specs = partition.explicit_results(operands, *letters)
        if specs is None:
            return function(*operands)
        automatic: Any = jax.sharding.auto_axes(function, out_sharding=specs)
        return automatic(*operands)

    return run


def _gpus(context: mlir.LoweringRuleContext) -> list | None:
    """The GPUs that a program is lowered for; None where it is not lowered for any that are here."""
    axes = context.module_context.axis_context
    devices = getattr(axes, "device_assignment", None)
    if devices is None:
        devices = getattr(getattr(axes, "mesh", None), "devices", np.array([])).flat
    # Where only some axes of a mesh are manual, JAX hands the partitioning rule a mesh without devices.
    return [device for device in devices if device is not None and device.platform == "gpu"] or None


def preferences(definition: Definition, spec, platform: str, avals) -> tuple[str, ...]:
    """The implementations to try, most wanted first: where none was asked for, what was measured decides the order."""
    names = spec.implementation
    if platform != "cuda" or names != dispatch.DEFAULT or is_empty(definition, spec, avals):
        return names
    for name in dispatch.KERNELS:
        with tune.recorded() as calls, contextlib.suppress(NotImplementedError):
            definition.plan(spec, name, padded_avals(definition, spec, name, avals))
        if calls:
            return tune.fastest_first(names, calls[0][0].op, calls[0][1])
    return names


def implementation(
    definition: Definition, spec, name: str, platform: str, avals, devices: Sequence[Any] | None
) -> Function:
    """The function of the operands that an implementation runs on a platform, compiled if it is a kernel.

    devices: the GPUs to compile for, as JAX devices of one architecture; None for those of the settings, or all here.

    Raises:
      NotImplementedError: it cannot serve the call there, with the reason.
    """
    plan = kernel_plan(definition, spec, name, platform, avals, devices)
    if plan is None:
        return definition.plain(spec, name if name == "reference" else "xla")
    return padded(definition, spec, name, avals, kernel_runner(plan, devices))


def kernel_plan(
    definition: Definition, spec, name: str, platform: str, avals, devices: Sequence[Any] | None = None
) -> Plan | None:
    """The plan of an implementation's kernels, checked against the architecture but not compiled.

    None where nothing is to be launched: for a pure JAX implementation, and for an empty call.
    devices: the GPUs that the program is for, all of which must take it. None while it is not known which of those here
    they will be (in tracing): then one that takes it is enough.

    Raises:
      NotImplementedError: no such kernels, or not for this platform, size, type or machine, with the reason.
    """
    if name not in dispatch.KERNELS:
        return None
    if platform != "cuda":
        raise NotImplementedError(
            f"its kernels run on NVIDIA GPUs, and this program is compiled for {platform!r}; run it on a GPU, or "
            "choose 'xla'."
        )
    if is_empty(definition, spec, avals):
        return None
    plan = definition.plan(spec, name, padded_avals(definition, spec, name, avals))
    if devices is None:
        _check_any(plan, compile.target_archs())
    else:
        for arch in compile.target_archs(devices):
            plan.check(arch)
    missing = ffi_targets.missing()
    if missing is not None:
        raise NotImplementedError(missing)
    return plan


def is_empty(definition: Definition, spec, avals: Sequence[ShapedArray]) -> bool:
    """Whether an axis has size zero that leaves kernels nothing to do."""
    letters, _ = definition.letters(spec)
    return any(
        size == 0 and letter not in definition.optional
        for axes, aval in zip(letters, avals, strict=True)
        for letter, size in zip(axes, aval.shape, strict=True)
    )


def _check_any(plan: Plan, archs: Sequence[str]) -> None:
    """Raises what the plan's check of the first architecture raises, if no other passes either."""
    refusal = None
    for arch in archs:
        try:
            return plan.check(arch)
        except NotImplementedError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def padded_avals(definition: Definition, spec, name: str, avals: Sequence[ShapedArray]) -> list[ShapedArray]:
    """The operands as the kernels of an implementation take them."""
    sizes = definition.padding(spec, name, avals)
    letters, _ = definition.letters(spec)
    return [
        aval.update(shape=tuple(sizes.get(letter, size) for letter, size in zip(axes, aval.shape, strict=True)))
        for aval, axes in zip(avals, letters, strict=True)
    ]


def padded(definition: Definition, spec, name: str, avals: Sequence[ShapedArray], kernels: Function) -> Function:
    """`kernels`, which take padded operands, as a function of the operands as they are."""
    shapes = [aval.shape for aval in padded_avals(definition, spec, name, avals)]
    if shapes == [aval.shape for aval in avals]:
        return kernels
    results = [aval.shape for aval in definition.abstract(spec, avals)]

    def run(*operands):
        grown = (
            jnp.pad(x, [(0, size - have) for size, have in zip(shape, x.shape, strict=True)])
            for x, shape in zip(operands, shapes, strict=True)
        )
        return tuple(y[tuple(map(slice, shape))] for y, shape in zip(kernels(*grown), results, strict=True))

    return run


def kernels_of(name: str, plans: Mapping[str, Callable]) -> Callable:
    """The entry of an implementation in an op's table of kernel plans.

    Raises:
      NotImplementedError: it has none, naming those that it has.
    """
    if name not in plans:
        language = {"cutile": "cuTile", "cuda": "CUDA C++"}[name]
        others = ", ".join(repr(other) for other in (*plans, "xla", "reference"))
        raise NotImplementedError(f"this op has no {language} kernels; choose among {others}.")
    return plans[name]


def kernel_runner(plan: Plan, devices: Sequence[Any] | None) -> Function:
    """The function that runs a plan's kernels, compiled now. A failing compiler is a refusal, never a silent one."""
    arch, *others = compile.target_archs(devices)
    if others:
        raise NotImplementedError(
            f"one program runs on GPUs of {' and '.join((arch, *others))}, and its kernels are compiled for one; give "
            "each architecture a program of its own, or choose 'xla'."
        )
    try:
        return launch.runner(plan, arch)
    except compile.CompileError as error:
        warnings.warn(f"jax_ssd: the kernels of {plan.name} do not compile: {error}", stacklevel=2)
        raise NotImplementedError(f"its kernels do not compile: {error}") from error


def require_possible(definition: Definition, spec, operands: Sequence[jax.Array]) -> None:
    """Refuse at trace time a call that no platform could serve with the implementations asked for.

    Raises:
      NotImplementedError: with every reason.
    """
    if not set(spec.implementation) <= set(dispatch.KERNELS):
        return  # the pure JAX implementations take every call
    avals = [jax.typeof(x) for x in operands]
    dispatch.first_accepting(
        definition.name, spec.implementation, lambda name: kernel_plan(definition, spec, name, "cuda", avals)
    )


def fold(axis_size: int, mapped, operands, letters: Sequence[str]) -> list[jax.Array]:
    """Merge a leading mapped axis into the batch axis of every operand.

    Per-head parameters (axis letter "r") keep their single row unless one of them is mapped or already has a row per
    batch entry; then all get one row per entry of the folded batch, since kernels take them alike.
    """
    batch = _batch(mapped, operands, letters)
    rows = [
        (x.shape[1] if m else x.shape[0], m)
        for x, m, axes in zip(operands, mapped, letters, strict=True)
        if axes[0] == "r"
    ]
    per_row = any(m or count > 1 for count, m in rows)

    def one(array, is_mapped, axes):
        if axes[0] == "r" and not per_row:
            return array
        if not is_mapped:
            array = jnp.broadcast_to(array[None], (axis_size, *array.shape))
        if axes[0] == "r":
            array = jnp.broadcast_to(array, (axis_size, batch, *array.shape[2:]))
        return array.reshape(axis_size * batch, *array.shape[2:])

    return [one(*row) for row in zip(operands, mapped, letters, strict=True)]


def _batch(mapped, operands, letters: Sequence[str]) -> int:
    """The size of the batch axis, behind a mapped one."""
    return next(
        x.shape[1] if m else x.shape[0] for x, m, axes in zip(operands, mapped, letters, strict=True) if axes[0] == "b"
    )


# Identity on values and, transposed, on cotangents; applied forward to a tangent it refuses in words. Without it
# jax.jvp of a custom_vjp fails with a message that says nothing about what to do.
_tangent_guard = Primitive("jax_ssd_reverse_mode_only")
_tangent_guard.def_abstract_eval(lambda tangent, *, message: tangent)


def _refuse_forward_mode(*_, message):
    raise NotImplementedError(message)


_tangent_guard.def_impl(_refuse_forward_mode)
mlir.register_lowering(_tangent_guard, _refuse_forward_mode)
ad.deflinear2(_tangent_guard, lambda cotangent, _, *, message: [cotangent])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def reverse_mode_only(x: jax.Array, message: str) -> jax.Array:
    """x itself; forward-mode differentiation through it raises NotImplementedError(message)."""
    del message
    return x


@reverse_mode_only.defjvp
def _(message, primals, tangents):
    (x,), (tangent,) = primals, tangents
    return reverse_mode_only(x, message), _tangent_guard.bind(tangent, message=message)


def _batch_guard(arguments, axes, *, message):
    return _tangent_guard.bind(*arguments, message=message), axes[0]


batching.primitive_batchers[_tangent_guard] = _batch_guard
