"""What a record says about this machine."""

import platform

from bench.report.machine import describe_machine, package_versions


def test_the_machine_is_described() -> None:
    machine = describe_machine()

    assert machine.system.startswith("Linux")
    assert machine.processor
    assert machine.cores >= 1
    assert machine.memory_gib > 0


def test_versions_are_those_of_installed_packages() -> None:
    versions = package_versions()

    assert versions["python"] == platform.python_version()
    assert versions["litestar"]
    assert all(versions.values())
