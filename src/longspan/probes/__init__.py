"""Probes, one file each: a claim of the theory, measured. A new file with a `Probe` in it needs no entry anywhere."""

import functools
import importlib
import pkgutil

from longspan.probes.base import Probe, Report, Size

__all__ = ["Probe", "Report", "Size", "all_probes", "get_probe", "probe_names"]


@functools.cache
def _probes() -> dict[str, Probe]:
    found: dict[str, Probe] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for probe in vars(module).values():
            if isinstance(probe, Probe):
                if probe.name in found:
                    raise ValueError(f"two probes are called {probe.name!r}, one of them in {module.__name__}")
                found[probe.name] = probe
    return dict(sorted(found.items()))


def probe_names() -> list[str]:
    """Names that `get_probe` knows."""
    return list(_probes())


def get_probe(name: str) -> Probe:
    """A probe by name."""
    if name not in _probes():
        raise ValueError(f"unknown probe {name!r}; there are {', '.join(probe_names())}")
    return _probes()[name]


def all_probes() -> list[Probe]:
    """Every probe."""
    return list(_probes().values())
