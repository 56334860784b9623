"""The modules in C, and for which interpreters they are built.

They use nothing outside the stable ABI of Python 3.11, so one wheel serves 3.11 and all later versions. An interpreter without
the GIL has no stable ABI: there they are built for that very version.
"""

import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
MACROS = [("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else []


def in_c(name: str, source: str, *arguments: str, depends: tuple[str, ...] = ()) -> Extension:
    """A module that the package works without: where there is no compiler, numpy and Python do its work.

    The environment's flags may ask for fast arithmetic, which has no NaN, and which linked in would hold for the whole process.
    """
    return Extension(
        name,
        [source],
        depends=list(depends),
        define_macros=MACROS,
        py_limited_api=STABLE_ABI,
        extra_compile_args=[*arguments, "-fno-fast-math"],
        extra_link_args=["-fno-fast-math"],
        optional=True,
    )


class WithPresets(build_py):
    """Copies the ready configurations into the package, where ``watch`` finds them by name."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            presets = Path(self.build_lib, "monitor", "config", "presets")
            presets.mkdir(parents=True, exist_ok=True)
            found = list(Path(__file__).parent.glob("configs/*.json"))
            if not found:
                raise FileNotFoundError("configs/*.json")
            for path in found:
                shutil.copyfile(path, presets / path.name)


# Vectors, and the same bits wherever they are computed: the compiler fuses no product into a sum, and rearranges nothing else.
KERNEL = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

HEADERS = tuple(f"monitor/stats/host_{part}.h" for part in ("kernel", "pass", "moments", "magnitudes"))
FAST_PATH = tuple(f"monitor/pytorch/fast_{part}.h" for part in ("tensors", "rows", "lists", "gradients", "graph"))

setup(
    cmdclass={"build_py": WithPresets},
    ext_modules=[
        in_c("monitor.stats._host_kernel", "monitor/stats/host_kernel.c", *KERNEL, depends=HEADERS),
        in_c("monitor.sinks._lines", "monitor/sinks/lines.c", "-O2"),
        in_c("monitor.mindspore._tape", "monitor/mindspore/tape.c", "-O2", depends=HEADERS),
        # It relies on the GIL.
        *(
            [in_c("monitor.pytorch._fast_path", "monitor/pytorch/fast_path.c", "-O2", depends=HEADERS + FAST_PATH)]
            if STABLE_ABI
            else []
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
