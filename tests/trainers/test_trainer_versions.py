"""Adapters name the versions that they are tested with, and refuse others."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
from paths import ROOT

from symmplan import trainers
from symmplan.errors import TrainerVersionError
from symmplan.trainers import versions


def installs(monkeypatch, version):
    monkeypatch.setattr(versions.metadata, "version", lambda _: version)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("transformers", "5.23.0"),
        ("transformers", "5.0.1"),
        ("transformers", "5.31.0.dev0"),
        ("torchtitan", "0.3.0"),
        ("torchtitan", "0.3.1.dev20261101+cu130"),
    ],
)
def test_versions_of_the_same_series_are_taken(package, version, monkeypatch):
    installs(monkeypatch, version)
    versions.require_tested(package)


@pytest.mark.parametrize(
    ("package", "version", "series"),
    [
        ("transformers", "4.57.1", "5.*"),
        ("transformers", "6.0.0", "5.*"),
        ("torchtitan", "0.2.2", "0.3.*"),
        ("torchtitan", "1.0.0", "0.3.*"),
    ],
)
def test_the_error_of_another_version_names_both(package, version, series, monkeypatch):
    installs(monkeypatch, version)
    with pytest.raises(TrainerVersionError) as caught:
        versions.require_tested(package)
    error = caught.value
    tested, extra = versions.TESTED[package]
    assert str(error).splitlines() == [
        f"trainer of another version: {package} {version} may differ from {package} {tested}",
        f"  expected {package} {series}; got {version}",
        f"  fix: python -m pip install 'symmplan[{extra}]'",
    ]
    assert (error.package, error.tested, error.installed) == (package, tested, version)


@pytest.mark.parametrize("adapter", ["hugging_face", "torchtitan"])
def test_an_adapter_is_refused_when_it_is_imported(adapter, monkeypatch):
    installs(monkeypatch, "0.1.0")
    monkeypatch.delitem(sys.modules, f"symmplan.trainers.{adapter}", raising=False)
    with pytest.raises(TrainerVersionError):
        importlib.import_module(f"symmplan.trainers.{adapter}")


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(name):
        raise versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    monkeypatch.delitem(sys.modules, "symmplan.trainers.hugging_face", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers: .*'symmplan\[trainers\]'"):
        _ = trainers.SymmplanCallback


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trainers.nonsense


def test_extras_install_what_is_tested():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package, (tested, extra) in versions.TESTED.items():
        listed = re.search(rf"^{extra} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)[1]
        assert f'"{package}=={tested}.*' in listed
