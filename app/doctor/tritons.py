"""Checks of all configured Tritons, one by one, and whether their default models match."""

from collections.abc import Iterator, Sequence

import msgspec

from app.doctor import triton
from app.doctor.finding import Finding, failure, ok, warning
from app.doctor.triton import Examination
from app.model.spec import are_interchangeable
from app.settings.schema import PREFIX, Settings
from app.triton.membership import Target, resolve


async def examine(settings: Settings) -> Examination:
    """Examine each Triton and its default model."""
    targets: list[Target] = []
    unresolved: list[Finding] = []
    for address in settings.triton_addresses:
        try:
            targets += await resolve(address)
        except OSError as error:
            fix = (
                f"check {PREFIX}TRITON_ENDPOINTS, and the name in the DNS; a headless service has addresses once its pods are ready"
            )
            unresolved.append(failure("triton", f"the name in {address} cannot be resolved: {error.strerror or error}", fix))
    examined = [await triton.examine(target, settings) for target in targets]
    return Examination(
        [*unresolved, *_gather_findings(settings.model, targets, examined), *_compare(settings.model, targets, examined)],
        any(one.maps_memory for one in examined),
        next((one.spec for one in examined if one.spec is not None), None),
    )


def _gather_findings(model: str, targets: Sequence[Target], examined: Sequence[Examination]) -> Iterator[Finding]:
    is_usable = any(one.spec for one in examined)
    for target, one in zip(targets, examined, strict=True):
        for each in one.findings:
            finding = each
            if is_usable and one.lacks_model and each.code == "model":
                text = f"Triton does not have {model}: only others answer requests for it"
                finding = warning(
                    "model", text, "nothing, if it is for other models; or put it into its repository, and start it again"
                )
            message = finding.message if len(targets) == 1 else f"{target.address}: {finding.message}"
            yield msgspec.structs.replace(finding, message=message)


def _compare(model: str, targets: Sequence[Target], examined: Sequence[Examination]) -> Iterator[Finding]:
    # Tritons where the model differs are not used for it.
    specs = {target.address: one.spec for target, one in zip(targets, examined, strict=True) if one.spec is not None}
    if len(specs) < 2:  # noqa: PLR2004
        return
    first, *others = specs
    different = [address for address in others if not are_interchangeable(specs[address], specs[first])]
    if different:
        text = f"{model} has another input or other outputs at {', '.join(different)} than at {first}: it is not used there"
        yield warning(
            "same_model", text, "give all Tritons the same model repository; beside a GPU, one on a CPU needs NEREID_SHAPES=square"
        )
    else:
        yield ok("same_model", f"{model} is the same at {len(specs)} Tritons")
