"""From a request's body to the encoded image and the fields that came with it, whatever the body's type."""
