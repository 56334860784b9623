"""What the fused kernels are compiled to, without a device: wide reads, and nothing in memory for want of registers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from evidence import sampled

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from monitor.stats.partials import COSTLY  # noqa: E402
from monitor.stats.triton import source as torch_fused_source  # noqa: E402
from monitor.stats.triton.launch import FIELDS, constants, options  # noqa: E402
from monitor.stats.triton.reading import FORMATS, Blocks  # noqa: E402
from monitor.stats.triton.rows import COLUMNS  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
WHOLE = {"ALIGNED": True, "EVEN": True, "HIGHER": False, "CHECK": False}
REGISTERS = 65_536
"""Of a multiprocessor, of each NVIDIA device so far."""


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: Any) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("compiled"))
        yield


def compiled(kernel: str, dtype: torch.dtype, target: GPUTarget = HOPPER, **layout: Any) -> Any:
    function, format_ = getattr(torch_fused_source, kernel), FORMATS[dtype]
    if kernel == "reduce_one":
        layout = {"DIMS": 0, "INDEX": "uint32"} | layout
    types = {each.name: "constexpr" if each.is_constexpr else each.annotation_type for each in function.params}
    source = ASTSource(function, types, constants(function, tl, format_, Blocks(), WHOLE | layout))
    try:
        return triton.compile(source, target=target, options=options(format_, Blocks(), target.warp_size))
    except FileNotFoundError as error:
        pytest.skip(f"a tool of Triton's is missing here: {error}")


def resources(kernel: Any, where: Any) -> dict[str, int]:
    """Registers of a thread, bytes of its stack and of local memory."""
    binary = where / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    said = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)], capture_output=True, text=True, check=True
    )
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout)}


def reads(kernel: Any) -> set[str]:
    """How elements are read: the loads that are neither of the workspace nor of a single number of 64 bits."""
    return set(re.findall(r"ld\.global\.(v\d\.b\d+|b8|b16|b32)\b", kernel.asm["ptx"]))


def of_elements(kernel: Any) -> int:
    """How many loads there are but for those of the workspace."""
    return len(re.findall(r"ld\.global\.(?!cg)", kernel.asm["ptx"]))


def single_numbers(kernel: Any) -> int:
    """Loads of 64 bits alone: the micro-step, columns of a table."""
    return len(re.findall(r"ld\.global\.b64\b", kernel.asm["ptx"]))


KERNELS = [
    ("reduce_one", torch.bfloat16, {}),
    ("reduce_one", torch.bfloat16, {"DIMS": 2}),
    ("reduce_many", torch.bfloat16, {}),
    ("reduce_one", torch.float64, {}),
    ("reduce_one", torch.float32, {}),
]


@pytest.mark.parametrize(("kernel", "dtype", "layout"), sampled(KERNELS, 0, 1, 2, 3), ids=str)
def test_elements_are_read_16_bytes_at_a_time_and_registers_suffice(
    kernel: str, dtype: torch.dtype, layout: dict[str, Any], tmp_path: Any
) -> None:
    built = compiled(kernel, dtype, **layout)
    assert reads(built) == {"v2.b64" if dtype is torch.float64 else "v4.b32"}
    assert single_numbers(built) == (1 if kernel == "reduce_one" else 1 + FIELDS)
    used = resources(built, tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    programs = REGISTERS // (-(-used["REG"] // 8) * 8 * Blocks().lanes)
    assert programs >= 4  # on a multiprocessor at once: what they have in flight covers the way to memory


def test_the_second_read_for_higher_moments_is_of_16_bytes_at_a_time_and_spills_next_to_nothing(tmp_path: Any) -> None:
    built = compiled("reduce_one", torch.bfloat16, HIGHER=True)
    assert reads(built) == {"v4.b32"}
    used = resources(built, tmp_path)
    assert used["STACK"] <= 16
    assert used["LOCAL"] == 0
    assert REGISTERS // (-(-used["REG"] // 8) * 8 * Blocks().lanes) >= 4


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.bfloat16, torch.float64], 0))
def test_check_sums_take_no_further_read_and_registers_suffice(dtype: torch.dtype, tmp_path: Any) -> None:
    without, built = (compiled("reduce_one", dtype, CHECK=check) for check in (False, True))
    assert reads(built) == reads(without)
    assert of_elements(built) == of_elements(without)
    used = resources(built, tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert REGISTERS // (-(-used["REG"] // 8) * 8 * Blocks().lanes) >= 4


def test_what_begins_anywhere_is_read_element_by_element_and_registers_suffice(tmp_path: Any) -> None:
    built = compiled("reduce_one", torch.bfloat16, ALIGNED=False, EVEN=False)
    assert (reads(built), single_numbers(built)) == ({"b16"}, 1)
    assert resources(built, tmp_path)["STACK"] == 0


def test_parts_are_reported_with_an_atomic_that_orders_what_was_stored_before() -> None:
    ptx = compiled("reduce_one", torch.bfloat16).asm["ptx"]
    assert len(re.findall(r"atom\.global\.gpu\.acq_rel\.add", ptx)) == 1
    assert not re.search(r"\b(red|atom)\.\S*f(16|32|64)", ptx)


@pytest.mark.parametrize("kernel", ["reduce_one", "reduce_many"])
def test_all_threads_have_stored_before_one_tells_and_the_last_program_reads_past_its_own_cache(kernel: str) -> None:
    built = compiled(kernel, torch.bfloat16)
    asked_before, asked_after = built.asm["ttir"].split(
        "tt.atomic_rmw add, acq_rel"
    )  # where a compiler's own barriers are not yet
    assert "barrier" in asked_before.rsplit("tt.store", 1)[1]
    assert "barrier" in asked_after.split("tt.load", 1)[0]
    before, after = built.asm["ptx"].split("atom.global.gpu.acq_rel.add")
    assert "bar.sync" in before.rsplit("st.global", 1)[1]
    first, *loads = re.split(r"ld\.global", after)
    assert "bar.sync" in first
    assert len(loads) == COLUMNS.value - 1 - len(COSTLY)
    assert all(load.startswith(".cg.") for load in loads)
    assert "ld.global.cg" not in before


def test_numbers_of_elements_are_divided_in_as_many_bits_as_they_have() -> None:
    for index, bits in (("uint32", {"32"}), ("uint64", {"32", "64"})):
        ptx = compiled("reduce_one", torch.bfloat16, DIMS=2, INDEX=index).asm["ptx"]
        assert set(re.findall(r"\b(?:div|rem)\.[us](\d\d)", ptx)) == bits


def test_the_kernels_compile_for_an_older_device_and_for_another_makers() -> None:
    assert reads(compiled("reduce_one", torch.bfloat16, GPUTarget("cuda", 80, 32))) == {"v4.b32"}
    assert "spill_count: 0" in compiled("reduce_many", torch.bfloat16, GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]
