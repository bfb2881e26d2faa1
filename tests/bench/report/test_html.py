"""HTML elements."""

from bench.report.html import row, section, table


def test_text_is_escaped_and_content_is_not() -> None:
    assert section("<t>", "<d>", "<p></p>") == "<section><h2>&lt;t&gt;</h2><p>&lt;d&gt;</p><p></p></section>\n"
    assert "&lt;n&gt;" in row("<n>", "m", [])
    assert 'title="&quot;"' in row("n", "m", [], '"')
    assert "<th>&lt;h&gt;</th>" in table(["<h>"], [])


def test_bad_numbers_are_marked_and_missing_ones_are_dashes() -> None:
    assert row("n", "m", [(1.0, True), (None, False)]).endswith("<td>m</td><td class=bad>1.00</td><td>-</td></tr>")
