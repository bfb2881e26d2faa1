"""How the gateway refers to a model: by its name, or by `name:version` where a request says which version.

Each has a spec, batches, a limit and circuits of its own; a request for the newest version uses those of the name. The name of
a model that a request can ask for has no colon.
"""


def refer_to(name: str, version: int | str | None) -> str:
    """Refer to a version of a model; None or empty for the one that Triton chooses, which is the newest."""
    return f"{name}:{version}" if version else name


def split_reference(reference: str) -> tuple[str, str]:
    """Return the name of a model and its version; empty for the one that Triton chooses."""
    name, _, version = reference.partition(":")
    return name, version
