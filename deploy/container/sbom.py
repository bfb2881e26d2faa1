"""Print the SBOM of an image in CycloneDX format: sbom.py DPKG_STATUS ENVIRONMENT ...

It contains the packages of Debian and of Python; Nereid itself is in the first environment. It does not contain the libraries
bundled in wheels.
"""

import json
import platform
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import quote

_CYCLONEDX = str(Path(sys.executable).with_name("cyclonedx-py"))


def main(status: Path, environments: list[Path]) -> None:
    """Print the document."""
    bom, *others = [_environment(environment) for environment in environments]
    known = {component["bom-ref"] for component in bom["components"]}
    for other in others:
        bom["components"] += [component for component in other["components"] if component["bom-ref"] not in known]
    bom["components"] += _debian(status)
    print(json.dumps(bom, indent=1))


def _environment(folder: Path) -> dict[str, Any]:
    """Return the document of an environment of Python packages."""
    python = str(folder / "bin" / "python")
    command = [_CYCLONEDX, "environment", "--pyproject", "pyproject.toml", "--output-reproducible", python]
    bom: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return bom


def _debian(status: Path) -> list[dict[str, Any]]:
    """Return the packages installed by dpkg as components."""
    release = platform.freedesktop_os_release()
    components = []
    for paragraph in status.read_text(encoding="utf-8").strip().split("\n\n"):
        package = Parser().parsestr(paragraph)
        if package["Status"] == "install ok installed":
            distribution = f"{release['ID']}-{release['VERSION_ID']}"
            purl = f"pkg:deb/{release['ID']}/{quote(package['Package'])}@{quote(package['Version'], safe=':~')}"
            purl += f"?arch={package['Architecture']}&distro={distribution}"
            components.append(
                {"type": "library", "bom-ref": purl, "name": package["Package"], "version": package["Version"], "purl": purl}
            )
    return components


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
