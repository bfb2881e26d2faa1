"""Which faces are put together."""

from app.search.persons import group

NOBODY = dict.fromkeys("abcdef")


def test_faces_that_pairs_connect_are_one_person() -> None:
    found = group([("a", "b"), ("b", "c"), ("d", "e")], NOBODY, (), 3)

    assert found == ([(None, ["a", "b", "c"])], [], 3)


def test_faces_join_the_person_whose_faces_they_are_like() -> None:
    """However few they are; and without a pair, the faces of a person stay together."""
    found = group([("a", "f")], NOBODY | {"a": "anna", "b": "anna", "c": "ben"}, (), 5)

    assert found == ([("anna", ["f"])], [], 2)


def test_persons_with_names_stay_apart() -> None:
    """A face that is like both belongs to the one whom it is most like."""
    persons = NOBODY | {"a": "anna", "b": "ben"}
    pairs = [("b", "c"), ("c", "a"), ("a", "d"), ("a", "b")]
    apart, together = group(pairs, persons, {"anna", "ben"}, 2), group(pairs, persons, (), 2)

    assert sorted(apart[0]) == [("anna", ["d"]), ("ben", ["c"])]
    assert apart[1:] == ([], 2)
    assert (len(together[0]), len(together[1])) == (1, 1)


def test_the_person_with_a_name_or_else_with_more_faces_stays() -> None:
    persons = NOBODY | {"a": "1", "b": "1", "c": "2", "d": "3"}
    pairs = [("c", "a"), ("d", "c"), ("x", "a")]  # x was added meanwhile

    assert group(pairs, persons, (), 2)[1] == [("2", "1"), ("3", "1")]
    assert group(pairs, persons, {"2"}, 2)[1] == [("1", "2"), ("3", "2")]
