"""Say what is wrong with a multipart form that its parser rejects."""

_BY_BOUNDARY = "the form is not well formed behind one of its boundaries: a line break or two hyphens must follow"
# The texts of the parser's errors, of which it has no other kind. They are not shown: some repeat parts of the body.
_DEFECTS = {
    "Empty boundary": 'the Content-Type header has no boundary; let the HTTP client write it: "multipart/form-data; boundary=x"',
    "Invalid characters in boundary": "the boundary in the Content-Type header has characters that no boundary may have",
    "Unexpected byte in front of first boundary": "the first boundary is not at the start of a line",
    "Invalid line break after first boundary": "the form has line breaks of LF; they must be CR LF",
    "Unexpected byte after first boundary": _BY_BOUNDARY,
    "Unexpected bytes after boundary": _BY_BOUNDARY,
    "Invalid line break in segment header": "the headers of a part end in LF; they must end in CR LF, and an empty line",
    "Malformed segment header": "a part has a header without a colon",
    "Invalid segment header name": "a part has a header whose name is not valid",
    "Unexpected segment header continuation": "the headers of a part begin with white space",
    "Empty segment header continuation": "a part has a header line of nothing but white space",
    "Missing Content-Disposition segment header": "a part has no Content-Disposition header",
    "Invalid Content-Disposition segment header: Wrong type": 'the Content-Disposition of a part is not "form-data"',
    "Multiple segment Content-Length headers": "a part has more than one Content-Length header",
    "Invalid segment Content-Length header value": "the Content-Length of a part is not a number",
    "Segment Content-Length exceeded": "a part is longer than its Content-Length",
    "Segment size does not match Content-Length header": "a part is shorter than its Content-Length",
    "Maximum segment count exceeded": "the form has too many parts; the maximum is {max_parts}",
    "Maximum segment header length exceeded": "a header of a part is too long; the maximum is 4 KiB",
    "Maximum segment header count exceeded": "a part has too many headers; the maximum is 8",
}
_UNKNOWN = "the form is not well formed"
_END = "Unexpected end of multipart stream"


def describe(error: ValueError, data: bytes, boundary: str, max_parts: int) -> str:
    """Return a sentence for the error that `PushMultipartParser` has raised for a body with this boundary."""
    text = str(error.args[0]) if error.args else ""
    if text.startswith(_END):
        if not data.startswith(f"--{boundary}".encode()) and f"\n--{boundary}".encode() not in data:
            return "the boundary of the Content-Type header does not occur in the body; let the HTTP client write both"
        return "the form ends before its last boundary, which has two hyphens at its end: it is incomplete"
    return _DEFECTS.get(text, _UNKNOWN).format(max_parts=max_parts)
