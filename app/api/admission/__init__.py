"""What a request passes before its body is received: context, route, framing, key, type, length, circuit, capacity."""
