"""Which versions of trainers the adapters are tested with."""

from __future__ import annotations

from importlib import metadata

from symmplan.errors import TrainerVersionError

__all__ = ["TESTED", "require_tested"]

#: ``{package: (version that is tested, extra of symmplan that installs it)}``.
TESTED = {"transformers": ("5.23", "trainers"), "torchtitan": ("0.3", "torchtitan")}


def require_tested(package: str) -> None:
    """Refuse a trainer whose interface may be another one.

    A package keeps its interface within a major version, and before 1.0 within a minor one.

    Raises:
        ModuleNotFoundError: The package is not installed; says how to install it.
        TrainerVersionError: It has another major version than the one that is tested, or, before
            1.0, another minor version.

    Collective: no.
    """
    tested, extra = TESTED[package]
    fix = f"python -m pip install 'symmplan[{extra}]'"
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f"symmplan.trainers needs {package}: {fix}", name=package
        ) from None
    if _series(installed) != _series(tested):
        raise TrainerVersionError(
            f"{package} {installed} may differ from {package} {tested}",
            expected=f"{package} {_series(tested)}.*",
            got=installed,
            fix=fix,
            package=package,
            tested=tested,
            installed=installed,
        )


def _series(version: str) -> str:
    """What two versions with one interface have in common."""
    major, minor = version.split(".")[:2]
    return major if int(major) else f"0.{minor}"
