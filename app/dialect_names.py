"""The dialects: interfaces of other detection services that the gateway has, too."""

DIALECTS = ("deepstack", "cvat", "label-studio", "ultralytics", "nim")
"""Their names. Each is a module of `app.api.dialects`, and the first segment of paths at which it can always be reached."""
