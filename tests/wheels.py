"""Small wheels that pip accepts."""

import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str = "1.0", *, files: dict[str, bytes], metadata: str = "") -> Path:
    """Write a wheel with these files; `metadata` is added to its METADATA, in lines."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", text)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in (*files, f"{info}/METADATA", f"{info}/WHEEL")))
    return path
