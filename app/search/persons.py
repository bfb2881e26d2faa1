"""Find out which faces are those of one person."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Annotated

from msgspec import Meta

from app.errors import UnknownRecord
from app.search.engine import SearchEngine

PersonName = Annotated[str, Meta(max_length=128, pattern=r"\A(?=.*\S)[^\x00-\x1f\x7f]+\Z", title="1 to 128 characters of one line")]

Groups = tuple[list[tuple[str | None, list[str]]], list[tuple[str, str]], int]
"""Faces that belonged to nobody, each list with the person whose they are, None for a new one; persons who are the same, the one
that ceases to be and the one that stays; and the number of faces that still belong to nobody."""


async def group_faces(engine: SearchEngine, tenant: str, min_score: float, min_faces: int) -> dict[str, int]:
    """Assign faces that are alike, from a cosine on, to persons, as `group` does; what remains if this fails is found next time."""
    persons, named = await engine.faces_by_person(tenant), await engine.named_persons(tenant)
    pairs = await engine.face_pairs(tenant, min_score)
    assigned, merged, singletons = await asyncio.to_thread(group, pairs, persons, named, min_faces)
    for source, target in merged:
        with suppress(UnknownRecord):  # somebody has deleted it meanwhile
            await engine.merge_persons(tenant, source, target)
    created = await engine.save_persons(tenant, assigned)
    counts = {"total_faces": len(persons), "persons_created": created, "singletons": singletons}
    return counts | {"faces_assigned": sum(len(faces) for _, faces in assigned)}


def group(pairs: Iterable[tuple[str, str]], persons: Mapping[str, str | None], named: Collection[str], min_faces: int) -> Groups:
    """Join faces that pairs connect, those that are most alike first, to the persons that there are, or to new ones.

    `persons` has the person of each face. The faces of a person stay together, and two persons who have names stay apart. Of
    persons who are joined, the one with a name stays, or the one with the most faces. A new one has at least `min_faces`.
    """
    first: dict[str, str] = {}
    parent = {face: face if person is None else first.setdefault(person, face) for face, person in persons.items()}
    fixed = {first[person] for person in named if person in first}

    def root_of(face: str) -> str:
        while parent[face] != face:
            parent[face] = face = parent[parent[face]]
        return face

    for pair in pairs:
        if persons.keys() >= {*pair}:  # no face that was added meanwhile
            one, other = sorted(map(root_of, pair), key=fixed.__contains__)
            if one != other and one not in fixed:
                parent[one] = other

    members = defaultdict[str, list[str]](list)
    for face in persons:
        members[root_of(face)].append(face)
    assigned: list[tuple[str | None, list[str]]] = []
    merged, singletons = [], 0
    for faces in members.values():
        known = Counter(person for face in faces if (person := persons[face]) is not None)
        target = max(known, key=lambda person: (person in named, known[person]), default=None)
        merged += [(person, target) for person in known if target is not None and person != target]
        loose = [face for face in faces if persons[face] is None]
        if loose and (target is not None or len(loose) >= min_faces):
            assigned.append((target, loose))
        else:
            singletons += len(loose)
    return assigned, merged, singletons
