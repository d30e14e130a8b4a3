"""Compiles every kernel for a Hopper GPU, without one: `python compile_kernels.py`, Triton's interpreter off."""

import inspect
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from longspan.kernels import (
    adam,
    backward,
    bounds,
    candidates,
    decode,
    decode_rows,
    decode_values,
    edges,
    gated,
    norms,
    output,
    rows,
    short,
    softmax,
    solve,
    stick,
    survey,
    topk,
)
from longspan.kernels.hopper import key as hopper_key
from longspan.kernels.hopper import output as hopper_output
from longspan.kernels.hopper import query as hopper_query
from longspan.kernels.hopper import solve as hopper_solve
from longspan.kernels.hopper import survey as hopper_survey

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"List": "i16", "Live": "i8", "Counts": "i32", "Ranges": "i32", "Lengths": "i64", "Documents": "i32"}
POINTERS |= {"Pages": "i32", "Table": "i32", "Starts": "i64", "Keys": "i32", "Arrivals": "i32", "Many": "i32"}
POINTERS |= {"Copies": "u8", "Held": "i32", "Over": "i32", "LowGradients": "bf16", "LowCopies": "bf16"}
HALVES = {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "Low", "High"}
HALVES |= {"Update", "dUpdate", "Normed", "dNormed", "Joint", "dJoint", "Out", "dOut"}
NUMBERS = {"learning_rate", "rise_1", "rise_2", "log_1", "log_2", "weight_decay", "clip", "share"}
NUMBERS |= {"a", "r", "scale", "tail", "tolerance", "aim", "slack", "unit", "reach", "epsilon", "most"}
OPTIONAL = {
    "Slopes": "SLOPES",
    "KeyNorms": "SLOPES",
    "dSlopes": "SLOPES",
    "Lengths": "LENGTHS",
    "Documents": "DOCUMENTS",
    "Scales": "SCALES",
    "dScales": "SCALES",
    "Starts": "STARTS",
    "Table": "PAGED",
    "Norms": "NORMS",
    "Bounds": "BOXES",
    "Floors": "BOXES",
    "Many": "DEFER",
    "Over": "COLLECTED",
    "EdgeGain": "ABOVE_2",
    "Residue": "REFINE",
    "Average": "AVERAGE",
    "Update": "AFTER",
    "dUpdate": "AFTER",
    "After": "AFTER",
    "Normed": "BEFORE",
    "dNormed": "BEFORE",
    "dResidual": "BEFORE",
    "Before": "BEFORE",
    "dHidden": "ADD",
}
PLAIN: dict[str, Any] = {
    "KIND": 4, "GUESS": True, "CONVEX": True, "TAIL": False, "CAUSAL": True, "SLOPES": False, "LENGTHS": False,
    "DOCUMENTS": False, "MASK_ALL": False, "PRECISION": "tf32", "MEAN": True, "GRAD": True, "MAP": True, "STATS": False,
    "M": 32, "N": 32, "PART": 32, "KEYS": 32, "CHUNK": 256, "BLOCK_D": 32, "BLOCK_DV": 32,
    "SCALES": False, "STARTS": False, "PAGED": False, "NORMS": False, "BOXES": False, "AT_ONCE": 16, "PROBES": 4,
    "EARLY": True, "COLLECTED": True, "REFINE": False, "CAP": 64, "DEFER": True, "SHARES": 4,
    "GATHER": 16, "PARTS": 16, "AVERAGE": False, "AFTER": True, "BEFORE": True, "KEEP": True,
    "ADD": True, "BLOCK": 256, "PLACES": False, "ABOVE_2": False, "SPLIT": False, "SLOPES_LEARN": True, "VOTES": False,
}  # fmt: skip
SPARSE: dict[str, dict[str, Any]] = {
    "slopes": {"SLOPES": True},
    "sloped_heads": {"SLOPES": True, "SPLIT": True, "SLOPES_LEARN": False},
    "other_heads": {"SPLIT": True, "SLOPES_LEARN": False},
    "masks": {"MASK_ALL": True, "LENGTHS": True, "DOCUMENTS": True},
    "future": {"CAUSAL": False},
    "stats": {"STATS": True, "GRAD": False},
    "no_mean": {"MEAN": False, "GRAD": False, "MAP": False},
    "any_alpha": {"KIND": -1, "GUESS": False, "TAIL": True},
    "float32": {"KIND": -2, "PRECISION": "ieee", "REFINE": True, "SLOPES": True},
    "by_rounds": {"COLLECTED": False},
    "votes": {"VOTES": True},
}
ABOVE_2: dict[str, dict[str, Any]] = {
    "alpha_3": {"KIND": 1, "CONVEX": False, "ABOVE_2": True},
    "above_2": {"KIND": -3, "CONVEX": False, "ABOVE_2": True},
    "masks_above_2": {**SPARSE["masks"], "KIND": -3, "CONVEX": False, "ABOVE_2": True},
    "float32_above_2": {**SPARSE["float32"], "KIND": -4, "CONVEX": False, "ABOVE_2": True},
}
COLLECTING = {name: SPARSE[name] for name in ("slopes", "masks", "future", "float32")}
ROOTS: dict[str, dict[str, Any]] = {
    "alpha_2": {"KIND": 2, "AT_ONCE": 16},
    "any_alpha": {"KIND": -2, "AT_ONCE": 16},
    "alpha_3": {"KIND": 1, "CONVEX": False, "ABOVE_2": True, "CAP": 32, "AT_ONCE": 32},
    "above_2": {"KIND": -4, "CONVEX": False, "ABOVE_2": True, "CAP": 32, "AT_ONCE": 32},
}
DECODING: dict[str, dict[str, Any]] = {
    "plain": {"M": 16, "CHUNK": 64},
    "options": {"M": 16, "CHUNK": 64, "SLOPES": True, "SCALES": True, "LENGTHS": True, "STARTS": True, "STATS": True},
    "pages": {"M": 16, "CHUNK": 64, "LENGTHS": True, "PAGED": True, "NORMS": True, "SLOPES": True},
    "boxes": {"M": 16, "CHUNK": 64, "NORMS": True, "BOXES": True, "SLOPES": True},
    "boxes_of_pages": {
        "M": 16,
        "CHUNK": 64,
        "NORMS": True,
        "BOXES": True,
        "LENGTHS": True,
        "PAGED": True,
    },
    "softmax": {"M": 64, "CHUNK": 64, "KIND": 0},
    "any_alpha": {"M": 16, "CHUNK": 64, "KIND": -1},
    "alpha_3": {"M": 16, "CHUNK": 64, "KIND": 1, "CONVEX": False},
    "above_2": {"M": 16, "CHUNK": 64, "KIND": -3, "CONVEX": False, "STATS": True},
    "short": {"M": 16, "CHUNK": 64, "DEFER": False, "STATS": True},
    "short_softmax": {"M": 16, "CHUNK": 64, "DEFER": False, "KIND": 0, "SHARES": 1},
}
NARROW_HEADS: dict[str, Any] = {"MASK_ALL": True, "M": 128, "N": 128, "BLOCK_D": 16, "BLOCK_DV": 16, "WARPS": 8}
BACKWARD: dict[str, dict[str, Any]] = {
    **SPARSE,
    **ABOVE_2,
    "softmax": {"KIND": 0},
    "softmax_of_float32": {"KIND": 0, "PRECISION": "ieee"},
    # CUDA 12.8's assembler crashed on a loop that was empty.
    "softmax_of_narrow_heads": NARROW_HEADS | {"KIND": 0, "DOCUMENTS": True, "PART": 64, "REGISTERS": 128},
}
SOLVING = {name: options for name, options in DECODING.items() if not name.startswith("boxes")}
NORMS: dict[str, dict[str, Any]] = {
    "both": {},
    "after": {"BEFORE": False},
    "before": {"AFTER": False},
    "before_alone": {"AFTER": False, "KEEP": False, "ADD": False},
    "wide": {"M": 1, "BLOCK": 2048, "PRECISION": "ieee"},
}
GATED: dict[str, dict[str, Any]] = {
    "wide": {"M": 4, "BLOCK": 512},
    "float32": {"M": 16, "BLOCK": 128, "PRECISION": "ieee"},
}
NARROW = {"BLOCK_D": 32, "BLOCK_DV": 32}
IN_GLUON = {"WARPS": 8, "M": 128, "N": 128, "PART": 64, "KEYS": 128, "BLOCK_D": 64, "BLOCK_DV": 64, "DEPTH": 2}
GLUON = {name: SPARSE[name] | IN_GLUON for name in ("sloped_heads", "masks", "any_alpha", "votes")}
ADAM: dict[str, Any] = {"PARTS": adam.PARTS, "BLOCK": adam.BLOCK}
SHORT: dict[str, dict[str, Any]] = {
    "alpha_1.5": {"SLOPES": True},
    "softmax": {"KIND": 0},
    "scales": {"SCALES": True},
    "places": {"KIND": 0, "PLACES": True, "SLOPES": True, "SCALES": True},
}
# A model of MQMTAR, and what else there is.
MEASURED: dict[str, dict[str, Any]] = {
    "plain": {"M": 64, "N": 64},
    "slopes": {"M": 64, "N": 64, "SLOPES": True},
    "masks": {"M": 64, "N": 64, "LENGTHS": True, "DOCUMENTS": True},
    "wide": {"BLOCK_D": 256, "BLOCK_DV": 256},
    "float32": {"PRECISION": "ieee", "SLOPES": True},
}

KERNELS: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "survey": (survey.survey_kernel, SPARSE),
    "collect": (candidates.collect_kernel, COLLECTING),
    "root": (candidates.root_kernel, ROOTS),
    "solve": (solve.solve_kernel, SPARSE),
    "edge": (edges.edge_kernel, ABOVE_2),
    "output": (output.output_kernel, SPARSE | ABOVE_2),
    "softmax": (
        softmax.softmax_kernel,
        {
            "slopes": {"SLOPES": True},
            "stats": {"STATS": True},
            "float32": {"PRECISION": "ieee"},
            "narrow_heads": NARROW_HEADS | {"LENGTHS": True},
            "narrow_heads_of_documents": NARROW_HEADS | {"DOCUMENTS": True},
        },
    ),
    "stick": (stick.stick_kernel, MEASURED),
    "topk": (
        topk.topk_kernel,
        {name: {"PLACES": 32, **options} for name, options in MEASURED.items()}
        | {"64_places": {"PLACES": 64, "M": 64, "N": 64}, "1_place": {"PLACES": 1, "M": 64, "N": 64, "CAUSAL": False}},
    ),
    "query": (backward.query_kernel, BACKWARD),
    "key": (backward.key_kernel, BACKWARD),
    "rows": (rows.rows_kernel, {"alpha_1.5": {"M": 2, "BLOCK": 512}, "any_alpha": {"KIND": -1, "M": 1, "BLOCK": 1024}}),
    "column": (backward.column_kernel, {"causal": {}}),
    "squares": (adam.squares_kernel, {"gradients": ADAM}),
    "adam": (adam.adam_kernel, {"clipped": ADAM | {"CLIP": True}, "averaged": ADAM | {"CLIP": False, "AVERAGE": True}}),
    "bound": (bounds.bound_kernel, {name: DECODING[name] for name in ("boxes", "boxes_of_pages")}),
    "score": (
        decode.score_kernel,
        {name: DECODING[name] for name in ("plain", "options", "pages", "boxes")}
        | {f"{rows}_rows": {"M": rows, "CHUNK": 64, "NORMS": True, "SLOPES": True} for rows in (8, 64)},
    ),
    "row": (decode_rows.row_kernel, SOLVING),
    "value": (decode_values.value_kernel, {name: SOLVING[name] for name in SOLVING if not name.startswith("short")}),
    "norms_forward": (norms.forward_kernel, {name: {"M": 4} | options for name, options in NORMS.items()}),
    "norms_backward": (
        norms.backward_kernel,
        {name: {"M": 8, "WARPS": 8} | options for name, options in NORMS.items()},
    ),
    "norms_sums": (norms.sums_kernel, {"programs": {"PARTS": 256, "BLOCK": 16, "WARPS": 8}}),
    "gated_forward": (gated.forward_kernel, GATED),
    "gated_backward": (gated.backward_kernel, GATED),
    "hopper_survey": (hopper_survey.survey_kernel, GLUON),
    "hopper_solve": (hopper_solve.solve_kernel, GLUON),
    "hopper_output": (hopper_output.output_kernel, GLUON | {"no_mean": SPARSE["no_mean"] | IN_GLUON}),
    "hopper_query": (hopper_query.query_kernel, GLUON),
    "hopper_key": (hopper_key.key_kernel, GLUON),
    "short_forward": (short._forward, SHORT | {"256_keys": {"M": 64, "N": 256, "WARPS": 8, **NARROW}}),
    "short_backward": (short._backward, SHORT | {"256_keys": {"M": 16, "N": 256, "WARPS": 8, **NARROW}}),
}


def signature_of(kernel: Any, options: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The types of a kernel's arguments, and the constants it is compiled for."""
    constants = PLAIN | options
    types: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        if parameter.annotation is triton.language.constexpr or name.endswith("_d"):
            types[name], fixed[name] = "constexpr", constants.get(name, 1)
        elif name in OPTIONAL and not constants[OPTIONAL[name]] and not (name == "Slopes" and constants["SPLIT"]):
            types[name], fixed[name] = "constexpr", None
        elif name in NUMBERS:
            types[name] = "fp32"
        elif name in HALVES:
            types[name] = "*fp32" if constants["PRECISION"] == "ieee" else "*bf16"
        elif (name[0].isupper() and not name.isupper()) or (name[0] == "d" and name[1:2].isupper()):
            types[name] = "*" + POINTERS.get(name, "fp32")
        else:
            types[name] = "i32"
    return types, fixed


def aligned(kernel: Any, types: dict[str, str]) -> dict[tuple[int], Any]:
    """What a launch knows of torch's memory and strides: the compiler takes other ways where loads are wide."""
    kinds = zip(kernel.params, types.values(), strict=True)
    known = (p.num for p, kind in kinds if kind.startswith("*") or (kind == "i32" and not p.do_not_specialize))
    return {(i,): [["tt.divisibility", 16]] for i in known}


def compiled(kernel: Any, options: dict[str, Any], launch: dict[str, Any]) -> Any:
    """A kernel for the constants in `options`, by the compiler's options in `launch`."""
    types, fixed = signature_of(kernel, options)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(source(kernel, types, fixed, aligned(kernel, types)), target=TARGET, options=launch)


def main() -> None:
    for name, (kernel, variants) in KERNELS.items():
        for variant, options in variants.items():
            compiled(kernel, options, {"num_warps": options.get("WARPS", 4), "maxnreg": options.get("REGISTERS")})
            print(name, variant, flush=True)


if __name__ == "__main__":
    main()
