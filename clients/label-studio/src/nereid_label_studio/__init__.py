"""ML backend of Label Studio that asks Nereid, an HTTP gateway for object detection."""
