"""Say in words which values a parameter may have."""

from msgspec import inspect


def expected_value(kind: type, name: str) -> str:
    """Return what a field of a Struct must be, such as `a number from 0 to 1`."""
    struct = inspect.type_info(kind)
    assert isinstance(struct, inspect.StructType)  # noqa: S101
    return next(_describe(field.type) for field in struct.fields if field.name == name)


def _describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner):
            return _describe(inner)
        case inspect.UnionType(types=types):
            return next(_describe(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return f"{'one of ' if len(values) > 1 else ''}{', '.join(map(repr, values))}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=least, le=most) | inspect.FloatType(ge=least, le=most):
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return f"{noun} from {least} to {most}"
    return "text"
